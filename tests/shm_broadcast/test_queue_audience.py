"""A queue's readers, some on the writer's host and some beyond a socket, go one by one.

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
from shm_broadcast.queue import message_queue
from shm_broadcast.queue.handle import SMALLEST_CAPACITY
from tests.netns import two_hosts
from tests.patience import NAMED_WITHIN, quickest, until
from tests.ranks import run_ranks
from tests.shm_broadcast.members import LIMIT, kill
from tests.shm_broadcast.queues import Running, ends
from tests.shm_broadcast.remote_peers import SECRET, get, put
from tests.shm_broadcast.test_board import bury

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

SMALL, LARGE = 1000, 3 << 20
"""Bytes of a message: several hundred make the ring full, and one fills it fifty times over."""

KINDS = {"local": 1, "remote": 2}
"""The rank that goes, of an audience of one of each kind."""


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
    """The end of ``rank``, of a queue with so many readers of each kind; all have joined."""
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
    """The last reader has left: the writer hears of it soon."""
    with pytest.raises(GroupClosedError, match="every reader has closed the queue"):
        send_for_ever(queue, SMALL)


def leave(rank: int, _n: int, folder: str, goes: int, size: int, n_messages: int) -> None:
    with audience(rank, folder, 1, 1) as queue:
        if rank == 0:
            for number in range(n_messages):
                queue.enqueue(message(number, size), LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
            return
        for number in range(3 if rank == goes else n_messages):
            assert queue.dequeue(LIMIT) == message(number, size)
    if rank != goes:
        put(folder, "read all", True)


@pytest.mark.parametrize("goes", KINDS)
@pytest.mark.parametrize(("size", "n_messages"), [(SMALL, 400), (LARGE, 12)])
def test_one_kind_of_reader_leaves_and_the_other_goes_on(
    goes: str, size: int, n_messages: int, tmp_path: Path
) -> None:
    run_ranks(3, leave, str(tmp_path), KINDS[goes], size, n_messages)


def die(rank: int, _n: int, folder: str, goes: int, size: int) -> float:
    """How long it took to be named."""
    named = 0.0
    with audience(rank, folder, 1, 1) as queue:
        if rank == 0:
            queue.enqueue(message(0, size), LIMIT)
            get(folder, "read one")
            killed = kill(folder, goes)
            numbers = count(1)
            with pytest.raises(PeerLostError) as caught:
                send_for_ever(queue, size, numbers)
            number = next(numbers) - 1  # no reader got it
            named = time.monotonic() - killed
            assert (caught.value.rank, caught.value.pid) == (goes, get(folder, f"pid {goes}"))
            with pytest.raises(PeerLostError):
                queue.enqueue(message(number, LARGE), LIMIT)
            queue.remove_reader(goes)
            for each in range(number, number + 80):
                queue.enqueue(message(each, size), LIMIT)
            queue.enqueue("last", LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
        elif rank == goes:
            assert queue.dequeue(LIMIT) == message(0, size)
            put(folder, "read one", True)
            time.sleep(LIMIT)
        else:
            for number in count():
                got = queue.dequeue(LIMIT)
                if got == "last":
                    assert number > 80
                    break
                assert got == message(number, size)
    put(folder, "read all", True)
    return named


@pytest.mark.parametrize("goes", KINDS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_one_kind_of_reader_dies_and_the_writer_may_go_on_with_the_other(
    goes: str, size: int, tmp_path: Path
) -> None:
    def attempt() -> float:
        folder, rank = mkdtemp(dir=tmp_path), KINDS[goes]
        return float(run_ranks(3, die, folder, rank, size, may_die=[rank])[0])

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


HUGE = 20 << 20
"""More than the ring and the credits of a reader beyond a socket: a writer waits for each."""


def go_amid_a_message(rank: int, _n: int, folder: str, goes: int, dies: bool) -> None:
    """The one that goes reads nothing, so that the writer waits for it."""
    waiting = [False]

    def tell(operation: str) -> None:
        if operation == "enqueue" and not waiting[0]:
            waiting[0] = True
            put(folder, "waiting", True)

    with audience(rank, folder, 1, 1, watch=tell) as queue:
        if rank == 0:
            first = 0
            if dies:
                numbers = count()
                with pytest.raises(PeerLostError, match=f"rank {goes}"):
                    send_for_ever(queue, HUGE, numbers)
                queue.remove_reader(goes)
                first = next(numbers) - 1  # no reader got it
            for number in range(first, first + 3):
                queue.enqueue(message(number, HUGE), LIMIT)
            queue.enqueue("last", LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
            return
        if rank == goes:
            get(folder, "waiting")
            time.sleep(0.1)
            if dies:
                kill(folder, rank)
            return
        for number in count():
            got = queue.dequeue(LIMIT)
            if got == "last":
                assert number >= 3
                break
            assert got == message(number, HUGE)
    put(folder, "read all", True)


@pytest.mark.parametrize("goes", KINDS)
@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
def test_one_kind_of_reader_goes_while_the_writer_waits_amid_a_message(
    goes: str, dies: bool, tmp_path: Path
) -> None:
    run_ranks(3, go_amid_a_message, str(tmp_path), KINDS[goes], dies, may_die=[KINDS[goes]])


def one_by_one(rank: int, n: int, folder: str, order: tuple[int, ...]) -> None:
    """The ``i``-th in ``order`` leaves after 60 more messages than the one before it."""
    with audience(rank, folder, 2, 2) as queue:
        if rank == 0:
            for number in range(60 * len(order)):
                queue.enqueue(message(number, SMALL if number % 50 else LARGE), LIMIT)
            for reader in order:
                get(folder, f"{reader} has left")
            expect_the_end(queue)
            return
        for number in range(60 * (1 + order.index(rank))):
            assert queue.dequeue(LIMIT) == message(number, SMALL if number % 50 else LARGE)
    put(folder, f"{rank} has left", True)


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (3, 4, 1, 2), (1, 3, 2, 4), (4, 2, 3, 1)])
def test_readers_leave_one_by_one_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(5, one_by_one, str(tmp_path), order)


def leave_before_the_others_come(rank: int, _n: int, folder: str) -> None:
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
            # The writer welcomes it although a reader on its own host is not there yet.
            queue.wait_until_ready(LIMIT)
        else:
            assert queue.dequeue(LIMIT) == "for those that stay"
            put(folder, f"read by {rank}", True)
    put(folder, f"{rank} has left", True)


def test_a_reader_beyond_a_socket_is_welcomed_before_those_on_the_host_are_there(
    tmp_path: Path,
) -> None:
    run_ranks(4, leave_before_the_others_come, str(tmp_path))


def test_who_has_not_joined_is_named_whatever_the_kind() -> None:
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
    """Nobody else joins: neither the other end, nor whoever shares the board that is watched."""
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


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_a_shutdown_ends_wait_until_ready_over_a_socket(end: str) -> None:
    with MessageQueue(2, 0, connect_ip="127.0.0.1", secret=SECRET) as queue:
        handle = queue.export_handle()
        with MessageQueue.create_from_handle(handle, 0, secret=SECRET) as reader:
            waiting = queue if end == "writer" else reader
            call = Running(waiting.wait_until_ready)
            assert not call.ended(within=0.1)
            waiting.shutdown()
            with pytest.raises(GroupClosedError):
                call.result()


def test_the_only_reader_joins_as_0_and_is_called_by_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pair:
        rank, world_size = 0, 2

        def broadcast_obj(self, obj: Any | None, src: int) -> Any:  # noqa: ARG002
            return obj

        def all_gather_obj(self, obj: Any) -> list[Any]:
            return [obj, obj]

    monkeypatch.setattr(message_queue, "ranks_beside", lambda *_: ())
    queue, _ = MessageQueue.create_from_process_group_single_reader(
        Pair(), reader_rank=1, connect_ip="127.0.0.1", secret=SECRET
    )
    with queue:
        with pytest.raises(GroupTimeoutError, match=r"rank 1 \(never joined\)"):
            queue.wait_until_ready(0)
        with MessageQueue.create_from_handle(queue.export_handle(), 0, secret=SECRET) as reader:
            queue.enqueue("here", LIMIT)
            assert reader.dequeue(LIMIT) == "here"
        with pytest.raises(ValueError, match="rank 2 is no reader"):
            MessageQueue.create_from_handle(queue.export_handle(), 2, secret=SECRET)


def test_a_message_at_which_a_reader_is_found_lost_still_reaches_all_others() -> None:
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


def leave_large_buffers(rank: int, _n: int, folder: str, goes: int) -> None:
    """The same with buffers that readers on the writer's host use where they lie."""
    arrays = [np.full(1 << 20, number, np.int64) for number in range(8)]
    with audience(rank, folder, 1, 1, zero_copy=True) as queue:
        if rank == 0:
            for array in arrays:
                queue.enqueue({"array": array}, LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
            return
        for array in arrays[: 2 if rank == goes else None]:
            assert np.array_equal(queue.dequeue(LIMIT)["array"], array)
    if rank != goes:
        put(folder, "read all", True)


@pytest.mark.parametrize("goes", KINDS)
def test_large_buffers_reach_the_kind_that_stays(goes: str, tmp_path: Path) -> None:
    run_ranks(3, leave_large_buffers, str(tmp_path), KINDS[goes])


def test_who_may_be_removed() -> None:
    with MessageQueue(2, 1, connect_ip="127.0.0.1", secret=SECRET) as queue:
        handle = queue.export_handle()
        with (
            MessageQueue.create_from_handle(handle, 0) as local,
            MessageQueue.create_from_handle(handle, 1, secret=SECRET) as remote,
        ):
            for reader in (0, 1):
                with pytest.raises(ValueError, match=rf"rank {reader} .*is not lost"):
                    queue.remove_reader(reader)
            with pytest.raises(ValueError, match="rank 7 is no reader"):
                queue.remove_reader(7)
            with pytest.raises(TypeError, match="this end of the queue reads"):
                local.remove_reader(0)
            ready = Running(remote.wait_until_ready, LIMIT)
            queue.wait_until_ready(LIMIT)
            ready.result()
            queue.enqueue("both are still served", LIMIT)
            assert local.dequeue(LIMIT) == remote.dequeue(LIMIT) == "both are still served"


def part(rank: int, _n: int, folder: str, hosts: Any, goes: int) -> None:
    hosts[rank == 2].enter()
    with audience(rank, folder, 1, 1, hosts[0].address) as queue:
        if rank == 0:
            for number in range(200):
                queue.enqueue(message(number, SMALL), LIMIT)
            queue.enqueue(message(200, HUGE), LIMIT)
            get(folder, "read all")
            expect_the_end(queue)
            return
        if rank != goes:
            for number in range(200):
                assert queue.dequeue(LIMIT) == message(number, SMALL)
            assert queue.dequeue(LIMIT) == message(200, HUGE)
    if rank != goes:
        put(folder, "read all", True)


@pytest.mark.namespaces
@pytest.mark.parametrize("goes", KINDS)
def test_the_same_on_two_hosts(goes: str, tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        run_ranks(3, part, str(tmp_path), hosts, KINDS[goes])
