"""Set-up while the process that hosts the store stands still: torch's stores then block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import coordinator
from coordinator import connect_store
from coordinator.rendezvous import Rendezvous
from coordinator.torch_groups import SocketChoice, connect_process_group
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
)
from tests.coordinator.test_bootstrap import reserved_port
from tests.coordinator.test_setup_faults import instead
from tests.patience import STALL_SECONDS, until
from tests.ranks import run_ranks
from tests.standing_store import store_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.standing_store import StandingStore

SECONDS = 1.5
LIMIT = 60.0

ENDS = """
import os, signal, sys
from coordinator import connect_store, init
from shm_broadcast import GroupTimeoutError
port, host = map(int, sys.argv[1:])
store = connect_store("127.0.0.1", port)
os.kill(host, signal.SIGSTOP)
try:
    init(tp=2, rank=1, world_size=2, store=store, timeout=0.5)
except GroupTimeoutError:
    print("in time")
"""


@pytest.fixture
def standing() -> Iterator[StandingStore]:
    with store_elsewhere() as store:
        yield store


@contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + STALL_SECONDS


def visit(standing: StandingStore, seconds: float, size: int = 2) -> Rendezvous:
    store = connect_store("127.0.0.1", standing.port)
    where = f"127.0.0.1:{standing.port}"
    return Rendezvous(store, 1, size, "world", Deadline.after(seconds), where, 0).begin_round(
        "world"
    )


def silent(standing: StandingStore) -> str:
    return rf"\(the store at 127\.0\.0\.1:{standing.port}.* does not answer\)"


@pytest.mark.parametrize(
    "ask",
    [
        lambda exchange: exchange.all_gather("hosts"),
        lambda exchange: exchange.broadcast("port", None),
        lambda exchange: exchange.ask("world look", lambda: exchange.store.check(["key"])),
        lambda exchange: exchange.sub("tp", [0, 1]),
    ],
    ids=["gather", "wait", "look", "visit"],
)
def test_it_is_said_that_the_store_does_not_answer(
    standing: StandingStore, ask: Callable[[Rendezvous], object]
) -> None:
    exchange = visit(standing, SECONDS)
    standing.stop()
    for _ in range(2):  # what is asked later stands behind it
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


def outcome_of(standing: StandingStore, rank: int, payload: bytes) -> list[bytes]:
    """What ``rank`` gathers in a new visit."""
    store = connect_store("127.0.0.1", standing.port)
    where = Deadline.after(LIMIT)
    return (
        Rendezvous(store, rank, 2, "world", where).begin_round("world").all_gather("hosts", payload)
    )


@pytest.mark.parametrize("stalled", ["gather", "visit"])
def test_who_comes_again_after_a_stall_is_not_taken_for_who_came_before(
    standing: StandingStore, stalled: str
) -> None:
    exchange = visit(standing, SECONDS)
    standing.stop()
    with pytest.raises(GroupTimeoutError, match="does not answer"):
        exchange.all_gather("hosts", b"first") if stalled == "gather" else visit(standing, 1.0)
    if stalled == "visit":
        exchange.abort(ValueError("no such thing here"))
    standing.go_on()
    until(lambda: not any(thread.name == "ask-store" for thread in threading.enumerate()))
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(outcome_of, standing, rank, b"again %d" % rank) for rank in (0, 1)]
        assert [each.result(LIMIT) for each in found] == [[b"again 0", b"again 1"]] * 2


def test_init_has_its_time_for_all_of_it(standing: StandingStore) -> None:
    store = connect_store("127.0.0.1", standing.port)
    threading.Timer(0.5, standing.stop).start()
    with in_time(), pytest.raises(GroupTimeoutError, match=silent(standing)):
        coordinator.init(tp=2, rank=1, world_size=2, store=store, timeout=SECONDS)


def test_gloo_has_its_time(standing: StandingStore) -> None:
    store = connect_store("127.0.0.1", standing.port)
    standing.stop()
    with in_time(), pytest.raises(GroupTimeoutError, match="connecting gloo: timed out"):
        connect_process_group(
            store, "tp", [0, 1], 1, "gloo", SocketChoice(address="127.0.0.1"), Deadline.after(1)
        )


def test_it_can_be_interrupted(standing: StandingStore) -> None:
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
def test_a_member_that_ends_is_heard_of(standing: StandingStore, seen: Exception) -> None:
    def see(what: str, there: Callable[[], bool]) -> None:
        if isinstance(seen, GroupAbortedError) or not there():
            raise seen

    exchange = visit(standing, LIMIT)
    standing.stop()
    with in_time(), pytest.raises(type(seen)):
        replace(exchange, watch=see).all_gather("hosts")


def test_a_process_ends_though_its_question_stands(standing: StandingStore) -> None:
    command = [sys.executable, "-c", ENDS, str(standing.port), str(standing.pid)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "in time\n"


def host_stops(rank: int, n: int, port: int, folder: Path) -> None:
    """Rank 0, whose process hosts the store, when all share a board."""
    if rank == 0:

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


def test_a_rank_that_hosts_the_store_and_stands_still(tmp_path: Path) -> None:
    with reserved_port() as port:
        run_ranks(3, host_stops, port, tmp_path)
