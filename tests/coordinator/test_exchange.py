"""Values swapped over a store; the members are threads, for an exchange needs no more."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from coordinator import rendezvous
from coordinator.rendezvous import Rendezvous, _digest, authenticated
from shm_broadcast import (
    Board,
    Deadline,
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    PeerProtocolError,
    TransportError,
)
from tests.patience import STALL_SECONDS, until
from tests.shm_broadcast.members import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def members(
    n: int,
    body: Callable[[Rendezvous], object],
    timeout: float = 10,
    store: Store | None = None,
    present: Sequence[int] | None = None,
) -> list[object]:
    store = store or HashStore()
    with ThreadPoolExecutor(n) as threads:
        calls = [
            threads.submit(body, Rendezvous(store, rank, n, "group", Deadline.after(timeout)))
            for rank in (range(n) if present is None else present)
        ]
        return [call.result(timeout + 10) for call in calls]


@pytest.mark.parametrize("prefixed", [False, True])
def test_all_gather_is_by_rank(prefixed: bool) -> None:
    store: Store = PrefixStore("p", HashStore()) if prefixed else HashStore()

    def body(exchange: Rendezvous) -> list[bytes]:
        time.sleep(0.01 * (3 - exchange.rank))
        return exchange.all_gather("letters", b"abc\0"[exchange.rank :])

    assert members(3, body, store=store) == [[b"abc\0", b"bc\0", b"c\0"]] * 3


def test_broadcast_from_any_member() -> None:
    def body(exchange: Rendezvous) -> bytes:
        return exchange.broadcast("word", b"x" if exchange.rank == 2 else None, src=2)

    assert members(3, body) == [b"x"] * 3


def test_the_source_of_a_broadcast_gives_something() -> None:
    with pytest.raises(ValueError, match="member 0 broadcasts and must pass"):
        members(1, lambda exchange: exchange.broadcast("word", None))


def test_whoever_looks_on_sees_who_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SHOW_SECONDS", 0.0)
    store = HashStore()

    def come(rank: int) -> list[bytes]:
        here = (board, (5, 2, 4)) if rank == 0 else None
        exchange = Rendezvous(store, rank, 3, "tp", Deadline.after(60))
        return replace(exchange, seen_on=here).all_gather("members")

    def seen() -> list[tuple[str, tuple[int, ...]]]:
        return [(each.operation, each.members) for each in status_of(board, 5).waits]

    with Board.create(6, 5) as board, ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(come, 0)]
        until(lambda: seen() == [("set-up of tp", (2, 4))])
        calls.append(threads.submit(come, 1))
        until(lambda: seen() == [("set-up of tp", (4,))])
        calls.append(threads.submit(come, 2))
        assert [call.result(60) for call in calls] == [[b""] * 3] * 3
        assert seen() == []


def test_absent_members_are_listed() -> None:
    store = HashStore()
    for came in (2, 3, 0):
        start = time.monotonic()
        with pytest.raises(
            GroupTimeoutError, match=r"group hello: timed out after 0\.3 s"
        ) as caught:
            members(5, lambda exchange: exchange.all_gather("hello"), 0.3, store, [came])
        assert 0.3 <= time.monotonic() - start < 0.3 + STALL_SECONDS
    assert [member.rank for member in caught.value.waiting_for] == [1, 4]
    assert {member.state for member in caught.value.waiting_for} == {"absent"}


class Asked:
    """A store that counts how often it was asked which keys are there."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.n_checks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        self.n_checks += not keys[0].endswith("/all")
        return self._store.check(keys)


def test_of_many_members_few_questions_tell_who_is_absent() -> None:
    """Each member that waits asks every second, and one process answers them all."""
    store: Any = Asked()
    for came in range(255):
        Rendezvous(store, came, 256, "group", Deadline.after(60))._publish("hello", b"")
    last = Rendezvous(store, 255, 256, "group", Deadline.after(60))
    assert last._payloads("hello").keys() == {*range(255)}
    assert store.n_checks <= 2 * 8 + 1


def test_an_absent_source_is_named() -> None:
    with pytest.raises(GroupTimeoutError, match="rank 1"):
        members(3, lambda exchange: exchange.broadcast("hello", None, src=1), 0.2, present=[0, 2])


def test_subgroups_do_not_meet() -> None:
    def body(exchange: Rendezvous) -> list[bytes]:
        ranks = [0, 2] if exchange.rank in (0, 2) else [3, 1]
        sub = exchange.sub("half", ranks)
        assert sub.size == 2
        assert ranks[sub.rank] == exchange.rank
        return sub.all_gather("who", bytes([exchange.rank]))

    assert members(4, body) == [[b"\0", b"\2"], [b"\3", b"\1"], [b"\0", b"\2"], [b"\3", b"\1"]]


@pytest.mark.parametrize("told", [(2, 3), (3, 2), (2, 3, 3), (3, 3, 2)])
def test_members_that_were_told_different_numbers_say_so_in_time(told: tuple[int, ...]) -> None:
    """Whoever comes first: none waits for members that nobody else knows of."""
    store = HashStore()

    def meet(rank: int) -> str:
        time.sleep(0.02 * rank)
        exchange = Rendezvous(store, rank, told[rank], "group", Deadline.after(1))
        with pytest.raises((ValueError, GroupTimeoutError)) as caught:
            exchange.all_gather("hosts", b"x")
        return str(caught.value)

    begin = time.monotonic()
    with ThreadPoolExecutor(len(told)) as threads:
        texts = list(threads.map(meet, range(len(told))))
    assert time.monotonic() - begin < 1 + STALL_SECONDS
    for rank, text in enumerate(texts):
        assert re.search(rf"has a group of \d members, this one has a group of {told[rank]}", text)


def test_a_store_that_has_gone_is_an_error_of_ours() -> None:
    hosts = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = hosts[0].port
    guest = TCPStore("127.0.0.1", port, is_master=False)
    exchange = Rendezvous(guest, 1, 2, "tp", Deadline.after(30), f"127.0.0.1:{port}", 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(exchange.all_gather, "hosts", b"x")
        until(lambda: hosts[0].check(["hosts/1"]))
        hosts.clear()
        with pytest.raises(TransportError, match=r"hosts: .* with rank 0 broke: the store at 127"):
            waiting.result(60)
    with pytest.raises(TransportError, match="tp members"):
        exchange.broadcast("members", None)


def test_what_is_no_value_of_a_member_is_a_typed_error() -> None:
    store = HashStore()
    store.set("hosts/1", "rubbish")
    exchange = Rendezvous(store, 0, 2, "tp", Deadline.after(0.1), called=(4, 6))
    with pytest.raises(PeerProtocolError, match=r"tp.* 6.*'hosts/1' .* a number of members"):
        exchange.all_gather("hosts", b"x")
    with pytest.raises(PeerProtocolError, match=r"tp.* 6.*'hosts/1' .* of type int: "):
        exchange.decoded(msgspec.msgpack.Decoder(int), "hosts", b"\xc1", 1)


def test_groups_of_other_members_meet_elsewhere_under_the_same_name() -> None:
    store = HashStore()

    def meet(ranks: tuple[int, ...], rank: int) -> list[bytes]:
        at = Rendezvous(store, rank, 2, "tp", Deadline.after(30), called=ranks).begin_round("tp")
        return at.all_gather("ranks", b"%d" % ranks[rank])

    with ThreadPoolExecutor(4) as threads:
        pairs = [(ranks, rank) for ranks in ((0, 11), (1, 1)) for rank in range(2)]
        found = list(threads.map(lambda each: meet(*each), pairs))
    assert found == [[b"0", b"11"]] * 2 + [[b"1", b"1"]] * 2


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tp", (1, 0)), ("tp", (0, 1, 2)), ("pp", (0, 1))],
    ids=["other order", "other ranks", "other name"],
)
def test_a_member_that_came_to_another_group_is_said_to_have(
    name: str, ranks: tuple[int, ...]
) -> None:
    world = Rendezvous(HashStore(), 0, 3, "world", Deadline.after(30))
    groups = {0: ("tp", (0, 1)), 1: (name, ranks)}

    def come(rank: int) -> str:
        exchange = replace(world, rank=rank).sub(*groups[rank], Deadline.after(0.5))
        with pytest.raises(GroupTimeoutError) as caught:
            exchange.all_gather("hosts")
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(come, groups))
    for rank, (wanted, its_ranks) in groups.items():
        came = f"rank {rank} last joined the set-up of {wanted} of ranks {list(its_ranks)}"
        assert came in told[1 - rank]


def test_the_log_says_for_whom_a_set_up_waits_long_before_its_time_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LOG_SECONDS", 0.2)
    world = Rendezvous(HashStore(), 0, 4, "world", Deadline.after(60))
    replace(world, rank=1).sub("pp", (1, 3))

    def told() -> list[str]:
        return [record.message for record in caplog.records]

    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(world.sub("tp", (0, 1, 2)).all_gather, "hosts")
        until(lambda: len(told()) == 2)
        for rank in (1, 2):
            threads.submit(replace(world, rank=rank).sub("tp", (0, 1, 2)).all_gather, "hosts")
        waiting.result(30)
    came = "rank 1 last joined the set-up of pp of ranks [1, 3]"
    assert told()[:2] == [f"tp hosts: waiting for ranks 1, 2 for {s} s; {came}" for s in (0.2, 0.4)]


def test_a_member_that_is_late_is_not_said_to_be_elsewhere() -> None:
    store = HashStore()
    there = Rendezvous(store, 0, 2, "tp", Deadline.after(0.2), called=(4, 6)).begin_round("tp")
    Rendezvous(store, 1, 2, "tp", Deadline.after(0.2), called=(4, 6)).begin_round("tp")
    with pytest.raises(GroupTimeoutError, match=r"rank 6 \(never joined\)$"):
        there.all_gather("hosts")


def test_a_member_that_is_late_is_not_said_to_be_where_all_were_before() -> None:
    store = HashStore()

    def come(name: str, rank: int) -> Rendezvous:
        exchange = Rendezvous(store, rank, 2, name, Deadline.after(0.2), called=(4, 6))
        return exchange.begin_round(name)

    for rank in range(2):
        come("kv", rank)
    with pytest.raises(GroupTimeoutError, match=r"rank 6 \(never joined\)$"):
        come("kv2", 0).all_gather("hosts")
    come("kv", 1)  # by its old name, again
    with pytest.raises(GroupTimeoutError, match=r"rank 6 last joined the .* kv of ranks \[4, 6\]"):
        come("kv2", 0).all_gather("hosts")


def visit(store: Store, rank: int, seconds: float) -> list[bytes]:
    """One member's set-up, of two."""
    exchange = Rendezvous(store, rank, 2, "world", Deadline.after(seconds)).begin_round("world")
    return exchange.all_gather("hosts", b"%d" % rank)


def all_meet(store: Store, come: Callable[[Store, int, float], list[bytes]], n: int = 2) -> None:
    """The ``n`` members of a set-up come, and meet."""
    with ThreadPoolExecutor(n) as threads:
        found = [threads.submit(come, store, rank, 30) for rank in range(n)]
        assert [each.result(60) for each in found] == [[b"%d" % rank for rank in range(n)]] * n


@pytest.mark.parametrize("tries", [1, 3])
def test_who_comes_late_meets_those_that_try_again(tries: int) -> None:
    """However often these have given up before it came, and without an error of its own."""
    store = HashStore()
    for _ in range(tries):
        with pytest.raises(GroupTimeoutError, match="rank 1"):
            visit(store, 0, 0.05)
    all_meet(store, visit)
    all_meet(store, visit)


def test_members_that_give_up_in_turns_meet_in_the_end() -> None:
    """Each has waited for the other, which was not there then, a different number of times."""
    store = HashStore()
    for rank in (0, 1, 1, 1, 0, 1):
        with pytest.raises(GroupTimeoutError):
            visit(store, rank, 0.05)
    all_meet(store, visit)


def enter(store: Store, rank: int, n: int = 3, seconds: float = 30) -> list[bytes]:
    exchange = Rendezvous(store, rank, n, "world", Deadline.after(seconds)).begin_round("world")
    return exchange.all_gather("terms", b"%d" % rank)


def test_those_that_waited_for_one_that_timed_out_meet_when_they_try_again() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        patient = threads.submit(enter, store, 0)
        with pytest.raises(GroupTimeoutError, match="rank 1"):
            enter(store, 2, seconds=0.05)
        with pytest.raises(GroupAbortedError, match="rank 2 reported: GroupTimeoutError"):
            patient.result(60)
        for each in [threads.submit(enter, store, rank) for rank in (2, 1, 0)]:
            assert each.result(60) == [b"0", b"1", b"2"]


def set_up(store: Store, rank: int, n: int = 3) -> Rendezvous:
    """One member's part in a set-up, up to its second step."""
    exchange = Rendezvous(store, rank, n, "world", Deadline.after(30), called=(4, 6, 9)[:n])
    inside = exchange.begin_round("world")
    inside.all_gather("terms", b"%d" % rank)
    return inside


def test_who_has_set_its_group_up_may_come_again_while_others_wait_for_each_other() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        inside = list(threads.map(partial(set_up, store), range(3)))
        with inside[2].setting_up():
            inside[2]._publish("hosts", b"2")
        waiting = threads.submit(inside[0].all_gather, "hosts", b"0")
        until(lambda: inside[0].store.check(["hosts/0"]))
        again = threads.submit(set_up, store, 2)
        until(lambda: store.check([f"group-coordinator/world{_digest((4, 6, 9))}/2/terms/2"]))
        assert not inside[0].store.check([rendezvous.ABORTED_KEY])
        assert inside[1].all_gather("hosts", b"1") == waiting.result(60) == [b"0", b"1", b"2"]
        others = [threads.submit(set_up, store, rank) for rank in range(2)]
        for each in (again, *others):
            each.result(60)


def test_who_hears_that_another_one_has_failed_says_so_on_its_board() -> None:
    """And not that it has failed itself, as its own error would say there afterwards."""
    store = HashStore()
    with ThreadPoolExecutor(3) as threads, Board.create(3, 1, ranks=(4, 6, 9)) as board:
        _, hears, fails = threads.map(partial(set_up, store), range(3))
        with pytest.raises(ValueError, match="no memory"), fails.setting_up():
            raise ValueError("no memory")
        with pytest.raises(GroupAbortedError) as caught:
            replace(hears, seen_on=(board, range(3))).all_gather("hosts")
        board.abort(caught.value)
        assert board.aborted == Failure(6, "ValueError", "no memory", 9)


def test_who_fails_in_a_set_up_tells_those_that_wait_why() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        inside = list(threads.map(partial(set_up, store), range(3)))
        waiting = [threads.submit(each.all_gather, "hosts") for each in inside[:2]]
        with pytest.raises(ValueError, match="no memory"), inside[2].setting_up():
            raise ValueError("no memory")
        for each in waiting:
            with pytest.raises(GroupAbortedError) as caught:
                each.result(60)
            assert caught.value.failure == Failure(9, "ValueError", "no memory", 9)


def test_the_first_that_gives_up_is_the_one_that_all_are_told_of() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        inside = list(threads.map(partial(set_up, store), range(3)))
    inside[2].abort(ValueError("no memory"))
    inside[1].abort(ValueError("another"))
    with pytest.raises(GroupAbortedError, match="rank 9 reported: ValueError: no memory"):
        inside[0].all_gather("hosts")


def test_what_is_no_reason_of_a_member_is_a_typed_error() -> None:
    exchange = Rendezvous(HashStore(), 0, 2, "world", Deadline.after(30)).begin_round("world")
    exchange.store.set(rendezvous.ABORTED_KEY, "rubbish")
    with pytest.raises(TransportError, match="'aborted' in the store must be of type Failure"):
        exchange.all_gather("hosts")


@pytest.mark.parametrize(
    "seen",
    [
        PeerLostError("hosts", MemberStatus(1, 4242, "lost")),
        GroupAbortedError("hosts", Failure(1, "ValueError", "no", 1)),
    ],
    ids=["lost", "aborted"],
)
def test_a_visit_is_given_up_where_a_member_is_seen_to_have_ended(seen: Exception) -> None:
    def see(what: str, there: Callable[[], bool]) -> None:
        raise seen

    store = HashStore()
    exchange = Rendezvous(store, 0, 2, "world", Deadline.after(30)).begin_round("world")
    with pytest.raises(type(seen)):
        replace(exchange, watch=see).all_gather("hosts")
    all_meet(store, visit)


SECRET = b"known to all of them"


def authenticate(store: Store, rank: int, seconds: float, n: int = 2) -> list[bytes]:
    """One member's set-up, of ``n`` that have a secret."""
    deadline = Deadline.after(seconds)
    with ExitStack() as closing:
        exchange = Rendezvous(store, rank, n, "world", deadline).begin_round("world")
        return authenticated(exchange, SECRET, closing).all_gather("hosts", b"%d" % rank)


def test_who_comes_late_meets_those_that_try_again_with_a_secret() -> None:
    """The first try has left its part of the key in the store."""
    store = HashStore()
    with pytest.raises(GroupTimeoutError, match="rank 1"):
        authenticate(store, 0, 0.3)
    all_meet(store, authenticate)
