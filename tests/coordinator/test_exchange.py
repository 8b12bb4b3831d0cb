"""Members exchange values over a store; they are threads, for an exchange needs no more."""

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
from torch.distributed import HashStore, Store, TCPStore

from coordinator import rendezvous
from coordinator.rendezvous import Rendezvous, _digest, authenticated
from shm_broadcast import (
    Board,
    Deadline,
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
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


def begun(
    store: Store,
    rank: int,
    n: int = 2,
    name: str = "world",
    seconds: float = 30,
    called: tuple[int, ...] = (),
) -> Rendezvous:
    """A member's set-up of a group, in its first round or a later one."""
    return Rendezvous(store, rank, n, name, Deadline.after(seconds), called=called).begin_round(
        name
    )


# --- values --------------------------------------------------------------------------------


def test_any_member_broadcasts_something() -> None:
    def body(exchange: Rendezvous) -> bytes:
        return exchange.broadcast("word", b"x" if exchange.rank == 2 else None, src=2)

    assert members(3, body) == [b"x"] * 3
    with pytest.raises(ValueError, match="member 0 broadcasts and must pass"):
        members(1, lambda exchange: exchange.broadcast("word", None))
    with pytest.raises(GroupTimeoutError, match="rank 1"):
        members(3, lambda exchange: exchange.broadcast("hello", None, src=1), 0.2, present=[0, 2])


def test_groups_of_other_members_meet_elsewhere() -> None:
    """Under the same name."""

    def body(exchange: Rendezvous) -> list[bytes]:
        ranks = [0, 2] if exchange.rank in (0, 2) else [3, 1]
        sub = exchange.sub("half", ranks)
        assert sub.size == 2
        assert ranks[sub.rank] == exchange.rank
        return sub.all_gather("who", bytes([exchange.rank]))

    assert members(4, body) == [[b"\0", b"\2"], [b"\3", b"\1"], [b"\0", b"\2"], [b"\3", b"\1"]]
    store = HashStore()

    def meet(ranks: tuple[int, ...], rank: int) -> list[bytes]:
        return begun(store, rank, name="tp", called=ranks).all_gather("ranks", b"%d" % ranks[rank])

    with ThreadPoolExecutor(4) as threads:
        pairs = [(ranks, rank) for ranks in ((0, 11), (1, 1)) for rank in range(2)]
        found = list(threads.map(lambda each: meet(*each), pairs))
    assert found == [[b"0", b"11"]] * 2 + [[b"1", b"1"]] * 2


def test_a_store_that_has_gone_is_a_typed_error() -> None:
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


def test_a_malformed_value_is_a_typed_error() -> None:
    store = HashStore()
    store.set("hosts/1", "rubbish")
    exchange = Rendezvous(store, 0, 2, "tp", Deadline.after(0.1), called=(4, 6))
    with pytest.raises(PeerProtocolError, match=r"tp.* 6.*'hosts/1' .* a number of members"):
        exchange.all_gather("hosts", b"x")
    with pytest.raises(PeerProtocolError, match=r"tp.* 6.*'hosts/1' .* of type int: "):
        exchange.decoded(msgspec.msgpack.Decoder(int), "hosts", b"\xc1", 1)
    exchange = begun(HashStore(), 0)
    exchange.store.set(rendezvous.ABORTED_KEY, "rubbish")
    with pytest.raises(TransportError, match="'aborted' in the store must be of type Failure"):
        exchange.all_gather("hosts")


# --- absent members ------------------------------------------------------------------------


def test_the_board_shows_the_members_that_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_of_many_members_few_questions_find_the_absent() -> None:
    """Each member that waits asks every second, and one process answers them all."""
    store: Any = Asked()
    for came in range(255):
        Rendezvous(store, came, 256, "group", Deadline.after(60))._publish("hello", b"")
    last = Rendezvous(store, 255, 256, "group", Deadline.after(60))
    assert last._payloads("hello").keys() == {*range(255)}
    assert store.n_checks <= 2 * 8 + 1


@pytest.mark.parametrize("told", [(2, 3), (3, 2), (2, 3, 3), (3, 3, 2)])
def test_members_with_different_numbers_raise_in_time(told: tuple[int, ...]) -> None:
    store = HashStore()

    def meet(rank: int) -> str:
        time.sleep(0.02 * rank)
        exchange = Rendezvous(store, rank, told[rank], "group", Deadline.after(0.5))
        with pytest.raises((ValueError, GroupTimeoutError)) as caught:
            exchange.all_gather("hosts", b"x")
        return str(caught.value)

    begin = time.monotonic()
    with ThreadPoolExecutor(len(told)) as threads:
        texts = list(threads.map(meet, range(len(told))))
    assert time.monotonic() - begin < 0.5 + STALL_SECONDS
    for rank, text in enumerate(texts):
        assert re.search(rf"has a group of \d members, this one has a group of {told[rank]}", text)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tp", (1, 0)), ("tp", (0, 1, 2)), ("pp", (0, 1))],
    ids=["other order", "other ranks", "other name"],
)
def test_an_error_names_the_group_where_a_member_is(name: str, ranks: tuple[int, ...]) -> None:
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


def test_the_log_names_the_absent_long_before_the_deadline(
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


def test_a_late_member_is_not_said_to_be_where_all_were_before() -> None:
    store = HashStore()
    come = partial(begun, store, seconds=0.2, called=(4, 6))
    come(1, name="tp")
    with pytest.raises(GroupTimeoutError, match=r"rank 6 \(never joined\)$"):
        come(0, name="tp").all_gather("hosts")
    for rank in range(2):
        come(rank, name="kv")
    with pytest.raises(GroupTimeoutError, match=r"rank 6 \(never joined\)$"):
        come(0, name="kv2").all_gather("hosts")
    come(1, name="kv")  # by its old name, again
    with pytest.raises(GroupTimeoutError, match=r"rank 6 last joined the .* kv of ranks \[4, 6\]"):
        come(0, name="kv2").all_gather("hosts")


# --- members that try again ----------------------------------------------------------------


def visit(store: Store, rank: int, seconds: float, n: int = 2) -> list[bytes]:
    return begun(store, rank, n, seconds=seconds).all_gather("hosts", b"%d" % rank)


def visit_with_a_secret(store: Store, rank: int, seconds: float, n: int = 2) -> list[bytes]:
    """The first try leaves its part of the key in the store."""
    with ExitStack() as closing:
        exchange = authenticated(
            begun(store, rank, n, seconds=seconds), b"known to all of them", closing
        )
        return exchange.all_gather("hosts", b"%d" % rank)


def all_meet(store: Store, come: Callable[[Store, int, float], list[bytes]] = visit) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(come, store, rank, 30) for rank in range(2)]
        assert [each.result(60) for each in found] == [[b"0", b"1"]] * 2


@pytest.mark.parametrize(
    ("come", "tries"),
    [(visit, (0,)), (visit, (0, 0, 0)), (visit, (0, 1, 1, 1, 0, 1)), (visit_with_a_secret, (0,))],
)
def test_members_that_gave_up_and_try_again_meet(come: Any, tries: tuple[int, ...]) -> None:
    """However often each has given up before the others came."""
    store = HashStore()
    for rank in tries:
        with pytest.raises(GroupTimeoutError, match=f"rank {1 - rank}"):
            come(store, rank, 0.05 if come is visit else 0.3)
    all_meet(store, come)
    all_meet(store, come)


def test_those_that_waited_for_one_that_timed_out_meet_when_they_try_again() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        patient = threads.submit(visit, store, 0, 30, 3)
        with pytest.raises(GroupTimeoutError, match="rank 1"):
            visit(store, 2, 0.05, 3)
        with pytest.raises(GroupAbortedError, match="rank 2 reported: GroupTimeoutError"):
            patient.result(60)
        for each in [threads.submit(visit, store, rank, 30, 3) for rank in (2, 1, 0)]:
            assert each.result(60) == [b"0", b"1", b"2"]


def set_up(store: Store, rank: int, n: int = 3) -> Rendezvous:
    """One member's part in a set-up, up to its second step."""
    inside = begun(store, rank, n, called=(4, 6, 9)[:n])
    inside.all_gather("terms", b"%d" % rank)
    return inside


def test_a_member_that_has_set_its_group_up_comes_again_while_others_wait() -> None:
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


# --- members that fail ---------------------------------------------------------------------


def test_a_member_that_fails_in_a_set_up_is_the_cause_on_all() -> None:
    """On the board, too; an error that follows is not."""
    store, failure = HashStore(), Failure(9, "ValueError", "no memory", 9)
    with ThreadPoolExecutor(3) as threads, Board.create(3, 1, ranks=(4, 6, 9)) as board:
        waits, shows, fails = threads.map(partial(set_up, store), range(3))
        shows = replace(shows, seen_on=(board, range(3)))
        waiting = [threads.submit(each.all_gather, "hosts") for each in (waits, shows)]
        with pytest.raises(ValueError, match="no memory"), fails.setting_up():
            raise ValueError("no memory")
        shows.abort(ValueError("another"))
        for each in waiting:
            with pytest.raises(GroupAbortedError) as caught:
                each.result(60)
            assert caught.value.failure == failure
        board.abort(caught.value)
        assert board.aborted == replace(failure, rank=6)
