"""Ranks that end, fail or stall during set-up, and a store that does not answer."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

import coordinator
from coordinator import StatelessGroupCoordinator, connect_store, context, hosts, torch_groups
from coordinator.compat.vllm.parallel_state import init_distributed_environment
from coordinator.groups import Topology
from coordinator.messages.wire import MessageCodec
from coordinator.rendezvous import Rendezvous
from coordinator.torch_groups import SocketChoice, connect_process_group
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    MessageQueue,
    PeerLostError,
    PeerProtocolError,
)
from tests.coordinator.test_bootstrap import reserved_port
from tests.patience import STALL_SECONDS, until
from tests.programs import Program
from tests.ranks import run_ranks
from tests.shared_store import SharedStore
from tests.standing_store import StandingStore, store_elsewhere

LIMIT = 60.0


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(*_: object, **__: object) -> None:
    raise ValueError("no such thing here")


def instead(step: str, other: Callable[..., object]) -> None:
    """Have this rank do something else in the place of a step of set-up."""
    module = torch_groups if step == "_gloo" else context
    assert hasattr(module, step)
    setattr(module, step, other)


def build(rank: int, n: int, store: Store, timeout: float, torch_only: bool = False) -> None:
    coordinator.init(n, rank=rank, store=store, timeout=timeout, torch_only=torch_only).close()


def one_dies(rank: int, n: int, store: Store) -> None:
    if rank == 1:  # once all share a board
        instead("negotiate_codec", die)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        build(rank, n, store, LIMIT)
    assert time.monotonic() - began < 5 + STALL_SECONDS
    assert caught.value.rank == 1


def test_a_rank_that_dies_during_set_up_is_named_at_once() -> None:
    run_ranks(3, one_dies, SharedStore(), may_die=[1])


def meet_altered(rank: int, n: int, store: Store, key: str, value: bytes) -> str:
    """The error, where the value that rank 0 puts into the store is replaced."""
    put = Rendezvous._put
    if rank == 0:
        Rendezvous._put = lambda self, at, said: put(self, at, value if at == key else said)
    with pytest.raises(PeerProtocolError if rank == 1 else CoordinatorError) as caught:
        build(rank, n, store, LIMIT if rank == 1 else 5.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rendezvous/0", b"2 \x01", r"of type dict\[str, str\]: Expected `object`, got `int`"),
        ("rendezvous/0", b"2 \xc1", r"of type dict\[str, str\]: MessagePack data is malformed"),
        ("boards/0", b"2 \x01", "of type BoardHandle: Expected `object`, got `int`"),
        ("boards/0", b"\xff\xff", "a number of members, a space and a value"),
        ("segment/0", b"\x01", "of type SegmentHandle: Expected `object`, got `int`"),
        ("segment/0", b"", "of type SegmentHandle: Input data was truncated"),
    ],
)
def test_an_altered_value_in_the_store_is_a_typed_error_with_its_key(
    key: str, value: bytes, expected: str
) -> None:
    said = run_ranks(2, meet_altered, SharedStore(), key, value)[1]
    assert re.search(rf"with rank 0: .*'{key}'.* must be {expected}", said), said


def at_swap(what: str, do: Callable[..., object]) -> None:
    """Have this rank do something else in the place of a swap of a group's set-up."""

    def swap(real: Callable[..., object], self: Rendezvous, name: str, *args: Any) -> Any:
        return do() if f"{self.name} {name}" == what else real(self, name, *args)

    for verb in ("all_gather", "broadcast"):
        setattr(Rendezvous, verb, partialmethod(partial(swap, getattr(Rendezvous, verb))))


def isolate(rank: int, how: str) -> None:
    """Have this rank share memory with no other: on another host, or in another container."""
    if how == "hosts":
        hosts._boot_id = lambda: b"of rank %d" % rank
    if how == "containers":
        hosts._try_to_attach = lambda *_: None


def one_fails(rank: int, n: int, store: Store, step: str, isolated: str) -> None:
    isolate(rank, isolated)
    if rank == 2:
        at_swap(step, give_up)
    with pytest.raises(ValueError if rank == 2 else GroupAbortedError) as caught:
        build(rank, n, store, LIMIT)
    assert "no such thing here" in str(caught.value)
    if not isinstance(caught.value, GroupAbortedError):
        die()
    else:
        assert caught.value.failure.culprit == 2


@pytest.mark.parametrize(
    ("step", "isolated"),
    [
        *((f"world {step}", "") for step in ("host", "boards", "decided", "board", "members")),
        *((f"world {step}", "hosts") for step in ("boards", "board", "hosts", "heartbeat")),
        *((f"undecided {step}", "containers") for step in ("host", "boards")),
        ("world members", "hosts"),
    ],
)
def test_why_one_failed_in_any_step_reaches_all_others(step: str, isolated: str) -> None:
    run_ranks(3, one_fails, SharedStore(), step, isolated, may_die=[2])


def one_has_no_queue(rank: int, n: int, store: Store) -> None:
    """The last step of a group's set-up: the queue for objects."""
    if rank == 0:
        MessageQueue.on_board = give_up
    with pytest.raises(ValueError if rank == 0 else GroupAbortedError, match="no such thing here"):
        StatelessGroupCoordinator([[0, 1, 2]], rank, "gloo", True, store, True, global_rank=rank)


def one_gives_up_by_names_of_vllm(rank: int, n: int, path: str) -> None:
    if rank == 1:
        instead("negotiate_codec", give_up)
    with pytest.raises(GroupAbortedError if rank != 1 else ValueError, match="no such thing here"):
        init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")


def one_gives_up_while_others_connect(rank: int, n: int, path: str) -> None:
    """Gloo's error of a connection that is closed on the way does not have the cause."""
    meet: Any = Topology.meet
    met: list[Any] = []

    def remember(*args: Any, **options: Any) -> Topology:
        met.append(meet(*args, **options))
        return met[0]

    def connect(*_: object, **__: object) -> None:
        if rank != 1:
            until(lambda: met[0].nodes.board.aborted is not None)
            raise RuntimeError("Gloo connectFullMesh failed: Connection closed by peer")

    Topology.meet = remember
    dist.init_process_group = connect
    one_gives_up_by_names_of_vllm(rank, n, path)


def test_why_one_failed_reaches_the_others_whatever_they_build(store_path: str) -> None:
    run_ranks(3, one_has_no_queue, SharedStore())
    run_ranks(3, one_gives_up_by_names_of_vllm, store_path)
    run_ranks(3, one_gives_up_while_others_connect, f"{store_path}-connect")


def one_does_not_connect(rank: int, n: int, store: Store) -> None:
    if rank == 1:
        instead("_gloo", die)
    with pytest.raises(PeerLostError, match=r"world:gloo: lost rank 1 ") as caught:
        build(rank, n, store, 2.0, torch_only=True)
    assert caught.value.rank == 1


def test_a_rank_that_ends_while_gloo_connects_is_named() -> None:
    run_ranks(3, one_does_not_connect, SharedStore(), may_die=[1])


def agree_late(*_: object, **__: object) -> MessageCodec:
    time.sleep(4)
    return MessageCodec()


def one_hangs(rank: int, n: int, store: Store) -> None:
    """The first rank that times out is not taken for the culprit."""
    if rank == 1:
        instead("negotiate_codec", agree_late)
        with pytest.raises(CoordinatorError):
            build(rank, n, store, LIMIT)
        return
    with pytest.raises((GroupTimeoutError, GroupAbortedError), match="rank 1") as caught:
        build(rank, n, store, 1.0 if rank == 0 else LIMIT)
    if isinstance(caught.value, GroupAbortedError):
        assert caught.value.failure.kind == "GroupTimeoutError"


def test_a_rank_that_hangs_is_named_by_all_others() -> None:
    run_ranks(3, one_hangs, SharedStore())


# --- the process that hosts the store is stopped: torch's stores then block ------------------

SECONDS = 1.5


@pytest.fixture
def standing() -> Iterator[StandingStore]:
    with store_elsewhere() as store:
        yield store


@contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + STALL_SECONDS


def visit(standing: StandingStore, seconds: float, rank: int = 1) -> Rendezvous:
    store, where = connect_store("127.0.0.1", standing.port), f"127.0.0.1:{standing.port}"
    deadline = Deadline.after(seconds)
    return Rendezvous(store, rank, 2, "world", deadline, where, 0).begin_round("world")


def silent(standing: StandingStore) -> str:
    return rf"\(the store at 127\.0\.0\.1:{standing.port}.* does not answer\)"


def test_errors_name_a_store_that_does_not_answer(standing: StandingStore) -> None:
    exchanges = [visit(standing, LIMIT) for _ in range(4)]
    standing.stop()
    asks: list[Callable[[Rendezvous], object]] = [
        lambda exchange: exchange.all_gather("hosts"),
        lambda exchange: exchange.broadcast("port", None),
        lambda exchange: exchange.ask("world look", lambda: exchange.store.check(["key"])),
        lambda exchange: exchange.sub("tp", [0, 1]),
    ]
    for ask in asks:
        exchange = replace(exchanges.pop(), deadline=Deadline.after(0.5))
        for _ in range(1 if exchanges else 2):  # the second question waits behind the first
            with in_time(), pytest.raises(GroupTimeoutError, match=silent(standing)) as caught:
                ask(exchange)
            assert "hosted by rank 0" in str(caught.value)
            assert caught.value.waiting_for == ()


def test_an_answer_that_comes_late_does_no_harm(standing: StandingStore) -> None:
    exchange = visit(standing, LIMIT)
    standing.stop()
    with in_time(), pytest.raises(GroupTimeoutError, match="does not answer"):
        replace(exchange, deadline=Deadline.after(0.1)).all_gather("hosts", b"late")
    threading.Timer(0.2, standing.go_on).start()
    exchange.broadcast("port", b"4321", src=1)
    assert exchange.ask("look", lambda: exchange.store.get("hosts/1")) == b"2 late"
    assert exchange.ask("look", lambda: exchange.store.get("port/1")) == b"4321"


@pytest.mark.parametrize("stalled", ["gather", "visit"])
def test_a_rank_in_its_next_round_is_not_taken_for_an_earlier_one(
    standing: StandingStore, stalled: str
) -> None:
    exchange = visit(standing, SECONDS)
    store = connect_store("127.0.0.1", standing.port)
    again = Rendezvous(store, 1, 2, "world", Deadline.after(1.0), keeper=0)
    standing.stop()
    with in_time(), pytest.raises(GroupTimeoutError, match="does not answer"):
        exchange.all_gather("hosts", b"first") if stalled == "gather" else again.begin_round(
            "world"
        )
    if stalled == "visit":
        exchange.abort(ValueError("no such thing here"))
    standing.go_on()
    until(lambda: not any(thread.name == "ask-store" for thread in threading.enumerate()))

    def outcome_of(rank: int) -> list[bytes]:
        return visit(standing, LIMIT, rank).all_gather("hosts", b"again %d" % rank)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(outcome_of, rank) for rank in (0, 1)]
        assert [each.result(LIMIT) for each in found] == [[b"again 0", b"again 1"]] * 2


def test_init_keeps_to_its_timeout(standing: StandingStore) -> None:
    store = connect_store("127.0.0.1", standing.port)
    threading.Timer(0.5, standing.stop).start()
    with in_time(), pytest.raises(GroupTimeoutError, match=silent(standing)):
        coordinator.init(tp=2, rank=1, world_size=2, store=store, timeout=SECONDS)


def test_gloo_keeps_to_its_timeout(standing: StandingStore) -> None:
    store = connect_store("127.0.0.1", standing.port)
    standing.stop()
    with in_time(), pytest.raises(GroupTimeoutError, match="connecting gloo: timed out"):
        connect_process_group(
            store, "tp", [0, 1], 1, "gloo", SocketChoice(address="127.0.0.1"), Deadline.after(1)
        )


def test_a_wait_for_the_store_can_be_interrupted(standing: StandingStore) -> None:
    exchange = visit(standing, LIMIT)
    standing.stop()
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))

    def gather() -> None:
        interrupt.start()
        exchange.all_gather("hosts")

    with in_time(0.3), pytest.raises(KeyboardInterrupt):
        gather()


@pytest.mark.parametrize(
    "seen",
    [
        PeerLostError("hosts", MemberStatus(1, 4242, "lost")),
        GroupAbortedError("hosts", Failure(1, "ValueError", "no", 1)),
    ],
    ids=["lost", "aborted"],
)
def test_the_end_of_a_member_ends_the_wait(standing: StandingStore, seen: Exception) -> None:
    def see(what: str, there: Callable[[], bool]) -> None:
        if isinstance(seen, GroupAbortedError) or not there():
            raise seen

    exchange = visit(standing, LIMIT)
    standing.stop()
    with in_time(), pytest.raises(type(seen)):
        replace(exchange, watch=see).all_gather("hosts")


def ask_and_end(port: str, host: str) -> None:
    store = connect_store("127.0.0.1", int(port))
    os.kill(int(host), signal.SIGSTOP)
    with pytest.raises(GroupTimeoutError):
        coordinator.init(tp=2, rank=1, world_size=2, store=store, timeout=0.5)


def test_a_process_exits_while_the_store_does_not_answer(standing: StandingStore) -> None:
    program = Program(ask_and_end, str(standing.port), str(standing.pid))
    _, errors = program.communicate()
    assert program.returncode == 0, errors


def host_stops(rank: int, n: int, port: int, folder: Path) -> None:
    if rank == 0:  # its process hosts the store; all share a board

        def stop(*_: object, **__: object) -> None:
            (folder / "host").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("is awake again")

        instead("negotiate_codec", stop)
        with pytest.raises((ValueError, CoordinatorError)):
            coordinator.init(n, rank=0, world_size=n, master_port=port, timeout=LIMIT)
        return
    try:
        with in_time(4.0), pytest.raises((GroupTimeoutError, GroupAbortedError)) as caught:
            coordinator.init(n, rank=rank, world_size=n, master_port=port, timeout=4.0)
        if isinstance(caught.value, GroupAbortedError):
            assert caught.value.failure.kind == "GroupTimeoutError"
        assert "hosted by rank 0, does not answer" in str(caught.value)
    finally:
        (folder / f"rank {rank}").touch()
        until(lambda: all((folder / f"rank {each}").exists() for each in range(1, n)))
        os.kill(int((folder / "host").read_text()), signal.SIGCONT)


def test_a_stopped_rank_that_hosts_the_store_is_named(tmp_path: Path) -> None:
    with reserved_port() as port:
        run_ranks(3, host_stops, port, tmp_path)
