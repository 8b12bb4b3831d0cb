"""Killed peers: each is named in time, the others go on, and a newcomer takes its place."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

from benchmarks.soak_kills import kill_at_random
from shm_broadcast import (
    Board,
    GroupClosedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
    SharedMemoryError,
)
from tests.forked import in_a_child
from tests.patience import NAMED_WITHIN, STALL_SECONDS, quickest, until
from tests.ranks import run_ranks
from tests.refusals import refuse
from tests.shm_broadcast.leaks import no_descriptors
from tests.shm_broadcast.members import LIMIT, joined, kill
from tests.shm_broadcast.queues import Running, ends
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 64 << 10
LARGE = 2 << 20


def kill_soon(folder: str, rank: int) -> Callable[[], float]:
    """Kill ``rank`` a little later; return a function that waits for the moment."""
    moments: list[float] = []

    def act() -> None:
        time.sleep(0.2)
        moments.append(kill(folder, rank))

    thread = threading.Thread(target=act)
    thread.start()

    def moment() -> float:
        thread.join(LIMIT)
        return moments[0]

    return moment


def assert_named(error: PeerLostError, folder: str, rank: int) -> None:
    assert (error.rank, error.pid) == (rank, get(folder, f"pid {rank}"))
    assert error.peer.age is not None and 0 <= error.peer.age < LIMIT
    assert f"lost rank {rank} (pid {error.pid}), " in str(error)
    assert "s ago" in str(error)


def send_for_ever(queue: MessageQueue, size: int, timeout: float) -> NoReturn:
    while True:
        queue.enqueue(b"x" * size, timeout)


def read_for_ever(queue: MessageQueue) -> NoReturn:
    while True:
        queue.dequeue(LIMIT)


# --- the dead peer is named ------------------------------------------------------------------


def lose_a_reader(rank: int, n: int, folder: str, size: int) -> float:
    named = 0.0
    with joined(rank, n, folder) as (_, queue):
        if rank == 0:
            killed = kill_soon(folder, 2)
            with pytest.raises(PeerLostError) as caught:
                send_for_ever(queue, size, LIMIT)
            named = time.monotonic() - killed()
            assert_named(caught.value, folder, 2)
            with pytest.raises(PeerLostError):
                queue.enqueue(b"x" * CAPACITY, LIMIT)
        elif rank == 1:
            with pytest.raises(GroupClosedError, match="the writer has shut the queue down"):
                read_for_ever(queue)
        else:
            time.sleep(LIMIT)
    return named


@pytest.mark.parametrize("size", [1000, 5 * CAPACITY])
def test_a_killed_reader_is_named_in_a_blocked_enqueue(size: int, tmp_path: Path) -> None:
    def attempt() -> float:
        return run_ranks(3, lose_a_reader, mkdtemp(dir=tmp_path), size, may_die=[2])[0]

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def lose_the_writer(rank: int, n: int, folder: str) -> float:
    """Ranks 1 and 2 wait amid the fragments of a message that rank 3 keeps from ending."""
    named = 0.0
    with joined(rank, n, folder) as (board, queue):
        if rank == 0:
            queue.enqueue("first")
            queue.enqueue(b"x" * (5 * CAPACITY), LIMIT)
        elif rank in (1, 2):
            assert queue.dequeue(LIMIT) == "first"
            if rank == 1:
                killed = kill_soon(folder, 0)
                put(folder, "killed", killed())
            with pytest.raises(PeerLostError) as caught:
                queue.dequeue(LIMIT)
            named = time.monotonic() - get(folder, "killed")
            assert_named(caught.value, folder, 0)
            put(folder, f"named by {rank}", True)
        else:
            for other in (1, 2):
                get(folder, f"named by {other}")
            assert board.lost() == [0]
    return named


def test_a_killed_writer_is_named_in_a_blocked_dequeue(tmp_path: Path) -> None:
    def attempt() -> float:
        _, *named = run_ranks(4, lose_the_writer, mkdtemp(dir=tmp_path), may_die=[0])
        return max(named)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def lose_a_writer_without_pidfd_open(rank: int, n: int, folder: str, number: int) -> int | None:
    refuse(number, "pidfd_open")
    with joined(rank, n, folder, writer=1) as (_, queue):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            queue.dequeue(timeout=LIMIT)
        assert time.monotonic() - began < 1 + STALL_SECONDS
    return caught.value.rank


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM])
def test_a_dead_peer_is_named_without_pidfd_open(number: int, tmp_path: Path) -> None:
    found = run_ranks(2, lose_a_writer_without_pidfd_open, str(tmp_path), number, may_die=[1])
    assert found[0] == 1


# --- a newcomer takes its place --------------------------------------------------------------


def respawn(rank: int, n: int, folder: str) -> int:
    """Rank 1 dies in the middle of the traffic; rank 3 takes its place; rank 2 goes on."""
    if rank == 3:
        get(folder, "killed")
        board_handle, queue_handle = get(folder, "handles")
        with (
            Board.attach(board_handle, 1) as board,
            MessageQueue.attach(queue_handle, board) as queue,
        ):
            numbers = list(iter(lambda: queue.dequeue(LIMIT), "end"))
        assert numbers == list(range(numbers[0], 3000))
        return int(numbers[0])
    with joined(rank, 3, folder) as (_, queue):
        if rank == 0:
            for number in range(3000):
                try:
                    queue.enqueue(number, LIMIT)
                except PeerLostError:
                    put(folder, "killed", True)
                    send_until_taken(queue, number)
            send_until_taken(queue, "end")
            until(lambda: not any(queue.behind().values()))
            return 0
        if rank == 1:
            for _ in range(100):
                queue.dequeue(LIMIT)
            os.kill(os.getpid(), 9)
        assert list(iter(lambda: queue.dequeue(LIMIT), "end")) == list(range(3000))
        return 0


def send_until_taken(queue: Any, message: Any) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            queue.enqueue(message, LIMIT)
        except PeerLostError:
            time.sleep(0.01)
        else:
            return


def test_a_respawned_reader_continues_and_the_others_lose_nothing(tmp_path: Path) -> None:
    results = run_ranks(4, respawn, str(tmp_path), may_die=[1])
    assert results == [0, None, 0, 100]


# --- large buffers, which lie in the writer's memory -----------------------------------------


def large(number: int) -> Any:
    return np.full(LARGE, number, np.uint8)


def shut_down_ahead(rank: int, n: int, folder: str) -> None:
    """Rank 0 shuts down before the others read; rank 2 leaves before it has read all."""
    with joined(rank, n, folder, zero_copy=True) as (_, queue):
        if rank == 0:
            for message in (large(1), "small", large(2)):
                queue.enqueue(message, LIMIT)
            queue.shutdown()
            put(folder, "shut down", True)
            get(folder, "left")
            until(lambda: blocks_open() == 1)
            put(folder, "one is left", True)
            until(lambda: blocks_open() == 0)
            return
        get(folder, "shut down")
        assert (queue.dequeue(LIMIT) == 1).all()
        if rank == 2:
            queue.shutdown()
            put(folder, "left", True)
            return
        get(folder, "one is left")
        assert queue.dequeue(LIMIT) == "small"
        assert (queue.dequeue(LIMIT) == 2).all()
        for _ in range(2):
            with pytest.raises(GroupClosedError, match="the writer has shut the queue down"):
                queue.dequeue(LIMIT)


def blocks_open() -> int:
    """Return how many blocks of large buffers this process, their writer, has mapped."""
    return Path("/proc/self/maps").read_text().count("group-block")


def test_readers_get_the_large_buffers_of_a_closed_writer(tmp_path: Path) -> None:
    run_ranks(3, shut_down_ahead, str(tmp_path))


def end_ahead(rank: int, n: int, folder: str, orderly: bool) -> None:
    """Rank 0 ends before rank 1 reads."""
    with joined(rank, n, folder, zero_copy=True) as (board, queue):
        if rank == 0:
            for message in ("first", large(1), "behind it", large(2)):
                queue.enqueue(message, LIMIT)
            if orderly:
                queue.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)
        until(board.lost)
        assert queue.dequeue(LIMIT) == "first"
        for _ in range(3):
            with pytest.raises(PeerLostError) as caught:
                queue.dequeue(LIMIT)
            assert_named(caught.value, folder, 0)
            with pytest.raises(PeerLostError), queue.acquire_read(LIMIT):
                pass


@pytest.mark.parametrize("orderly", [True, False], ids=["shut down", "killed"])
def test_large_buffers_that_ended_with_their_writer_name_it(orderly: bool, tmp_path: Path) -> None:
    run_ranks(2, end_ahead, str(tmp_path), orderly, may_die=[0])


# --- few resources, many kills ---------------------------------------------------------------


def test_a_queue_survives_a_lack_of_descriptors() -> None:
    in_a_child(enqueue_and_dequeue_without_descriptors)


def enqueue_and_dequeue_without_descriptors() -> None:
    large = np.arange(2 << 20, dtype=np.uint8)
    with ends(zero_copy=True) as made, no_descriptors():
        with pytest.raises(GroupTimeoutError):
            made.reader.dequeue(0.5)
        received = Running(made.reader.dequeue, LIMIT)
        made.writer.enqueue(large, LIMIT)  # by the ring
        assert (received.result() == large).all()
    with ends(zero_copy=True) as made:
        made.writer.enqueue([large, "first", large[::-1].copy()])
        made.writer.enqueue("second")
        with no_descriptors(), pytest.raises(SharedMemoryError, match="Too many open files"):
            made.reader.dequeue(LIMIT)
        there, name, back = made.reader.dequeue(LIMIT)
        assert name == "first"
        assert (there == large).all() and (back == large[::-1]).all()
        assert made.reader.dequeue(LIMIT) == "second"


@pytest.mark.stress
def test_kills_at_random_moments() -> None:
    with ExitStack() as beside:

        def make_named_memory(_: str) -> None:
            """As another program may at any time."""
            beside.enter_context(NamedTemporaryFile(dir="/dev/shm"))

        # The promise is one second; the rest is for machines that run other tests meanwhile.
        context = multiprocessing.get_context("forkserver")
        shown = kill_at_random(context, rounds=8, seed=7, say=make_named_memory, limit=5)
    assert shown.wrong == []
    assert shown.rounds == 8
