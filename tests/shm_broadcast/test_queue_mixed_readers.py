"""Readers on the writer's host and on others leave and die independently of each other.

Rank 0 writes, ranks of `LOCAL` read the ring, ranks of `REMOTE` a socket, each in its own process.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from itertools import count
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

from shm_broadcast import (
    Board,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
)
from shm_broadcast.net.protocol import Probe, encode
from shm_broadcast.net.writer import RemoteWriter
from shm_broadcast.queue.handle import SMALLEST_CAPACITY
from tests.netns import two_hosts
from tests.patience import NAMED_WITHIN, quickest, until
from tests.ranks import run_ranks
from tests.shm_broadcast.members import LIMIT, kill
from tests.shm_broadcast.queues import Running, ends
from tests.shm_broadcast.remote_peers import SECRET, SILENCE, get, put
from tests.shm_broadcast.test_board import bury

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

SMALL, LARGE, HUGE = 1000, 3 << 20, 20 << 20
"""Bytes of a message: much less than a ring, fifty rings, more than a ring and remote credits."""

KINDS = {"local": 1, "remote": 2}
"""The rank that leaves or dies, of one reader of each kind."""


@contextmanager
def audience(
    rank: int,
    folder: str,
    local: int,
    remote: int,
    address: str = "127.0.0.1",
    watch: Callable[[str], None] | None = None,
    zero_copy: bool = False,
) -> Iterator[MessageQueue]:
    """Yield the end of ``rank``, of a queue with so many readers of each kind; all have joined."""
    readers = range(1, 1 + local + remote)
    put(folder, f"pid {rank}", os.getpid())
    if rank == 0:
        queue = MessageQueue(
            local + remote,
            local,
            list(readers[:local]),
            SMALLEST_CAPACITY,
            connect_ip=address,
            remote_reader_ranks=readers[local:],
            writer_rank=0,
            secret=SECRET,
            watch=watch,
            zero_copy=zero_copy,
        )
        put(folder, "handle", queue.export_handle())
    else:
        queue = MessageQueue.create_from_handle(get(folder, "handle"), rank, secret=SECRET)
    with queue:
        queue.wait_until_ready(LIMIT)
        yield queue


def message(number: int, size: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * size


def send_for_ever(queue: MessageQueue, size: int, numbers: Iterable[int] = count()) -> NoReturn:
    for number in numbers:
        queue.enqueue(message(number, size), LIMIT)
    raise AssertionError("the numbers ran out")


def expect_the_end(queue: MessageQueue) -> None:
    """The last reader has left: the writer is notified soon."""
    with pytest.raises(GroupClosedError, match="every reader has closed the queue"):
        send_for_ever(queue, SMALL)


# --- readers that leave ----------------------------------------------------------------------


def leave_in_turn(rank: int, n: int, folder: str, order: tuple[int, ...], hosts: Any) -> None:
    """The ``i``-th in ``order`` leaves after 60 more messages than the one before it."""
    local = n // 2
    if hosts is not None:
        hosts[rank > local].enter()
    address = "127.0.0.1" if hosts is None else hosts[0].address

    def content(number: int) -> Any:
        """Bytes stream through the ring; an array is used where it lies."""
        size = HUGE if number == 55 else SMALL if number % 25 else LARGE
        plain = bytes([number % 251]) * size
        return np.frombuffer(plain, np.uint8) if number % 50 else plain

    with audience(rank, folder, local, n - 1 - local, address, zero_copy=True) as queue:
        if rank == 0:
            for number in range(60 * len(order)):
                queue.enqueue((number, content(number)), LIMIT)
            for reader in order:
                get(folder, f"{reader} has left")
            expect_the_end(queue)
            return
        for number in range(60 * (1 + order.index(rank))):
            got, received = queue.dequeue(LIMIT)
            assert got == number
            assert bytes(received) == bytes(content(number))
    put(folder, f"{rank} has left", True)


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (4, 2, 3, 1)])
def test_readers_leave_in_any_order_and_the_others_go_on(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(1 + len(order), leave_in_turn, str(tmp_path), order, None)


@pytest.mark.namespaces
def test_readers_on_two_hosts_leave_in_any_order(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        run_ranks(3, leave_in_turn, str(tmp_path), (2, 1), hosts)


def leave_amid_a_message(rank: int, _n: int, folder: str, goes: int) -> None:
    """Rank ``goes`` reads nothing, so that the writer waits for it."""

    def note(operation: str) -> None:
        if operation == "enqueue":
            put(folder, "waiting", True)

    with audience(rank, folder, 1, 1, watch=note) as queue:
        if rank == 0:
            for number in range(3):
                queue.enqueue(message(number, HUGE), LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
        elif rank == goes:
            get(folder, "waiting")
        else:
            for number in range(3):
                assert queue.dequeue(LIMIT) == message(number, HUGE)
            put(folder, "read all", True)


@pytest.mark.parametrize("goes", KINDS)
def test_one_kind_of_reader_leaves_while_the_writer_waits_amid_a_message(
    goes: str, tmp_path: Path
) -> None:
    run_ranks(3, leave_amid_a_message, str(tmp_path), KINDS[goes])


# --- readers that die ------------------------------------------------------------------------


def die(rank: int, _n: int, folder: str, goes: int) -> float:
    named = 0.0
    with audience(rank, folder, 1, 1) as queue:
        if rank == 0:
            queue.enqueue(message(0, LARGE), LIMIT)
            get(folder, "read one")
            killed = kill(folder, goes)
            numbers = count(1)
            with pytest.raises(PeerLostError) as caught:
                send_for_ever(queue, LARGE, numbers)
            number = next(numbers) - 1  # no reader got it
            named = time.monotonic() - killed
            assert (caught.value.rank, caught.value.pid) == (goes, get(folder, f"pid {goes}"))
            with pytest.raises(PeerLostError):
                queue.enqueue(message(number, LARGE), LIMIT)
            queue.remove_reader(goes)
            for each in range(number, number + 20):
                queue.enqueue(message(each, LARGE), LIMIT)
            queue.enqueue("last", LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
        elif rank == goes:
            assert queue.dequeue(LIMIT) == message(0, LARGE)
            put(folder, "read one", True)
            time.sleep(LIMIT)
        else:
            for number in count():
                got = queue.dequeue(LIMIT)
                if got == "last":
                    assert number > 20
                    break
                assert got == message(number, LARGE)
    put(folder, "read all", True)
    return named


@pytest.mark.parametrize("goes", KINDS)
def test_one_kind_of_reader_dies_and_the_other_is_served(goes: str, tmp_path: Path) -> None:
    def attempt() -> float:
        folder, rank = mkdtemp(dir=tmp_path), KINDS[goes]
        return float(run_ranks(3, die, folder, rank, may_die=[rank])[0])

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def test_a_message_at_which_a_reader_is_found_lost_still_reaches_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RemoteWriter.__init__.__kwdefaults__, "silence", SILENCE)
    with MessageQueue(3, 1, connect_ip="127.0.0.1", secret=SECRET) as queue:
        handle = queue.export_handle()
        local, dead, other = (
            MessageQueue.create_from_handle(handle, rank, secret=SECRET) for rank in range(3)
        )
        calls = [Running(each.wait_until_ready, LIMIT) for each in (dead, other)]
        queue.wait_until_ready(LIMIT)
        for call in calls:
            call.result()
        remote: Any = queue._end._remote
        gone: Any = dead._end._remote
        gone._zmq.disconnect(handle.remote.address)
        until(lambda: not remote._send_to(remote._links[1].identity, [encode(Probe())]))
        queue.enqueue("found", LIMIT)
        with pytest.raises(PeerLostError, match="lost rank 1"):
            queue.enqueue("to nobody", LIMIT)
        for rank, says in [(0, r"rank 0 .*is not lost"), (7, "rank 7 is no reader")]:
            with pytest.raises(ValueError, match=says):
                queue.remove_reader(rank)
        with pytest.raises(TypeError, match="this end of the queue reads"):
            local.remove_reader(0)
        queue.remove_reader(1)
        queue.enqueue("next", LIMIT)
        for end in (local, other):
            assert [end.dequeue(LIMIT) for _ in range(2)] == ["found", "next"]
            end.shutdown()
        expect_the_end(queue)
        dead.shutdown()


def test_a_successor_of_a_removed_reader_begins_with_the_next_message() -> None:
    with ends(2) as made:
        made.writer.enqueue("unread")
        bury(made.boards[0], 1)
        with pytest.raises(PeerLostError):
            made.fill()
        made.writer.remove_reader(1)
        other = made.readers[1]
        assert other.dequeue(LIMIT) == "unread"
        while other.readable():
            other.dequeue(LIMIT)
        with Board.attach(made.boards[0].handle(), 1) as board:
            with pytest.raises(ValueError, match=r"rank 1 .*is not lost"):
                made.writer.remove_reader(1)
            successor = made.attach(board)
            made.writer.enqueue("for both", LIMIT)
            assert successor.dequeue(LIMIT) == other.dequeue(LIMIT) == "for both"
            successor.shutdown()


# --- joining ---------------------------------------------------------------------------------


def leave_before_the_others_join(rank: int, _n: int, folder: str) -> None:
    if rank == 0:
        with audience(rank, folder, 1, 2) as queue:
            queue.enqueue("for those that stay", LIMIT)
            get(folder, "read by 1")
            get(folder, "read by 3")
        return
    handle = get(folder, "handle")
    if rank == 1:
        get(folder, "2 has left")
    with MessageQueue.create_from_handle(handle, rank, secret=SECRET) as queue:
        if rank == 2:
            queue.wait_until_ready(LIMIT)
        else:
            assert queue.dequeue(LIMIT) == "for those that stay"
            put(folder, f"read by {rank}", True)
    put(folder, f"{rank} has left", True)


def test_a_remote_reader_is_admitted_before_local_ones_have_joined(tmp_path: Path) -> None:
    run_ranks(4, leave_before_the_others_join, str(tmp_path))


def test_readers_of_any_kind_that_have_not_joined_are_named() -> None:
    with MessageQueue(4, 2, connect_ip="127.0.0.1", secret=SECRET) as queue:
        with (
            MessageQueue.create_from_handle(queue.export_handle(), 1),
            pytest.raises(GroupTimeoutError) as caught,
        ):
            queue.wait_until_ready(0.1)
        assert [status.rank for status in caught.value.waiting_for] == [0, 2, 3]
        assert caught.value.operation.endswith("wait_until_ready")
        assert caught.value.timeout == 0.1


@pytest.mark.parametrize("member", [0, 1], ids=["writer", "reader"])
@pytest.mark.parametrize("ending", ["shutdown", "watched board"])
def test_wait_until_ready_over_a_ring_can_be_ended(member: int, ending: str) -> None:
    with Board.create(1, member=0) as watched, Board.create(2, member=member) as board:
        end = MessageQueue.on_board(board, 0, [1])
        end._end._watch = watched.check
        call = Running(end.wait_until_ready)
        assert not call.ended(within=0.1)
        if ending == "shutdown":
            end.shutdown()
        else:
            watched.abort("stop")
        with pytest.raises(GroupClosedError if ending == "shutdown" else GroupAbortedError):
            call.result()
