"""Messages of `ShmBackend`: pipes and spills by hand, then between processes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm.shm.channel import (
    EAGER_BYTES,
    HEADER_BYTES,
    KEPT_ROOM,
    OVERFLOW_KEPT_BYTES,
    PIECE_BYTES,
    RING_BYTES,
    SMALL_BYTES,
    OverflowPool,
)
from device_comm.shm.collectives import GroupMembership
from device_comm.shm.layout import GroupLayout
from device_comm.shm.transfers import PeerPipes, ReceiveTask, SendTask
from shm_broadcast import (
    Board,
    BoardHandle,
    DivergenceError,
    GroupClosedError,
    GroupTimeoutError,
    Segment,
    SharedMemoryError,
)
from tests.device_comm.shm_ranks import make_comm, on_ranks, shm_of
from tests.forked import in_a_child
from tests.shm_broadcast.leaks import no_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 2


@pytest.fixture
def pipes() -> Iterator[list[PeerPipes]]:
    group = GroupLayout.for_ranks(N)
    with Board.create(N, 0) as board, Segment.create(group.size, "test") as segment:
        both = []
        for rank in range(N):
            member = GroupMembership(board, range(N), rank, segment, group)
            both.append(PeerPipes(board, member, rank, segment, group))
        yield both
        for each in both:
            each.close()


def send(pipes: list[PeerPipes], x: torch.Tensor) -> SendTask:
    return SendTask(pipes[0], 1, "send", x)


def receive(pipes: list[PeerPipes], out: torch.Tensor, operation: str = "recv") -> ReceiveTask:
    return ReceiveTask(pipes[1], 0, operation, (out,))


@pytest.mark.parametrize(
    "size",
    [1, 63, 64, 65, PIECE_BYTES, PIECE_BYTES + 1, RING_BYTES, KEPT_ROOM, KEPT_ROOM + 1, 5 << 20],
)
def test_messages_of_every_size_arrive(pipes: list[PeerPipes], size: int) -> None:
    for turn in range(3):
        x = (torch.arange(size) + turn).to(torch.uint8)
        out = torch.zeros(size, dtype=torch.uint8)
        receiving = receive(pipes, out)
        assert not receiving.advance(0)
        sending = send(pipes, x)
        assert sending.advance(0), "a sender needs no receiver"
        x.zero_()
        assert receiving.ready()
        assert receiving.advance(0)
        assert torch.equal(out, (torch.arange(size) + turn).to(torch.uint8))


def test_a_message_is_kept_while_its_memory_cannot_be_mapped(pipes: list[PeerPipes]) -> None:
    x = torch.arange(KEPT_ROOM // 8)
    out = torch.zeros_like(x)
    receiving = receive(pipes, out)
    assert send(pipes, x).advance(0)

    def receive_it() -> None:
        with no_descriptors(), pytest.raises(SharedMemoryError, match="Too many open files"):
            receiving.advance(0)
        assert receiving.advance(0)
        assert torch.equal(out, x)

    in_a_child(receive_it)  # where no other thread wants descriptors


def test_messages_go_on_where_the_ring_ends(pipes: list[PeerPipes]) -> None:
    """Chunks of 64 and 5,056 bytes: the ring does not hold a whole number of them."""
    assert RING_BYTES % (64 + 5_056)
    for number in range(3 * RING_BYTES // 5_000):
        x = torch.full((5_000,), number % 251, dtype=torch.uint8)
        out = torch.zeros_like(x)
        assert send(pipes, x).advance(0)
        assert receive(pipes, out).advance(0)
        assert torch.equal(out, x), number


@pytest.mark.parametrize("elements", [1, 0])
def test_a_full_pipe_makes_the_sender_wait(pipes: list[PeerPipes], elements: int) -> None:
    """A message takes a chunk of 64 bytes, and a number takes 64 bytes of data."""
    count = RING_BYTES // ((1 + elements) * HEADER_BYTES)

    def message(number: int) -> torch.Tensor:
        return torch.full((elements,), number)

    for number in range(count):
        assert send(pipes, message(number)).advance(0)
    last = send(pipes, message(count))
    assert not last.advance(0)
    assert not last.ready()
    assert list(last.missing()) == [1]
    for number in range(count + 1):
        out = message(-1)
        assert receive(pipes, out).advance(0)
        assert torch.equal(out, message(number))
        if number == 0:
            assert last.ready()
            assert last.advance(0)
    assert not receive(pipes, message(-1)).ready()


def test_a_message_without_elements_is_not_taken_for_the_next_one(pipes: list[PeerPipes]) -> None:
    """Nor the next one for it: whoever expects the other is told."""
    none, some, out = torch.ones(0, 3), torch.ones(3), torch.zeros(3)
    assert not receive(pipes, none.clone()).advance(0)
    for x in (none, some):
        assert send(pipes, x).advance(0)
    with pytest.raises(DivergenceError, match=r"send of 0 bytes of torch\.float32"):
        receive(pipes, out).advance(0)
    with pytest.raises(DivergenceError, match=r"recv of 0 bytes of torch\.int64"):
        receive(pipes, torch.zeros(0, dtype=torch.int64)).advance(0)
    assert receive(pipes, none.clone()).advance(0)
    with pytest.raises(DivergenceError, match="send of 12 bytes"):
        receive(pipes, none.clone()).advance(0)
    assert receive(pipes, out).advance(0)
    assert out.all()


@pytest.mark.parametrize("found", [True, False])
def test_a_sender_that_closes_is_named(pipes: list[PeerPipes], found: bool) -> None:
    """What it sent before can be received if the receiver had found its pipe."""
    receiving = receive(pipes, torch.zeros(3), "tp recv")
    assert send(pipes, torch.ones(3)).advance(0)
    assert not found or receiving.ready()
    pipes[0].membership.mark_left()
    pipes[0].close()
    if found:
        assert receiving.advance(0)
        receiving = receive(pipes, torch.zeros(3), "tp recv")
    assert receiving.ready()
    with pytest.raises(GroupClosedError, match="tp recv: rank 0 has closed the group") as caught:
        receiving.advance(0)
    assert caught.value.rank == 0


def test_a_receiver_that_closes_is_named(pipes: list[PeerPipes]) -> None:
    while (sending := send(pipes, torch.ones(0))).advance(0):
        pass
    assert not sending.ready()
    pipes[1].membership.mark_left()
    assert sending.ready()
    with pytest.raises(GroupClosedError, match="send: rank 1 has closed the group"):
        sending.advance(0)
    assert not pipes[0].undelivered()


@on_ranks(3)
def test_a_flush_waits_for_receivers_and_frees_spills(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    large = torch.ones(8 << 20, dtype=torch.uint8)
    with make_comm(rank, board, path) as comm:
        if rank == 0:
            comm.send(torch.ones(4), 2)
            comm.send(large, 1)
        if rank == 2:
            comm.recv((4,), torch.float32, 0)
        comm.barrier()
        if rank == 0:
            with pytest.raises(GroupTimeoutError) as caught:
                comm.flush(0.3)
            assert [member.rank for member in caught.value.waiting_for] == [1]
        comm.barrier()
        if rank == 1:
            comm.recv(large.shape, large.dtype, 0)
        comm.barrier()
        if rank == 0:
            comm.flush(10)
            assert shm_of(comm)._pipes.overflows.size <= OVERFLOW_KEPT_BYTES + 4 * 4096


def test_threads_that_send_to_different_ranks_take_different_spills() -> None:
    """The caller sends to one rank while the progress thread goes on sending to another."""
    pool = OverflowPool()
    problems: list[str] = []

    def send(mark: int) -> None:
        try:
            for turn in range(200):
                overflow = pool.take(KEPT_ROOM // 2, 0)
                memory = overflow.segment.memory[-overflow.room :]
                memory[0] = mark
                time.sleep(0)
                if memory[0] != mark or overflow.segment.closed:
                    problems.append(f"turn {turn}: another thread uses or forgets this spill")
                overflow.mark(taken=False)
        except BaseException as error:  # noqa: BLE001 - shown below
            problems.append(repr(error))

    threads = [threading.Thread(target=send, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert problems == []


def test_a_message_that_no_rank_receives_takes_few_spills(pipes: list[PeerPipes]) -> None:
    x = torch.zeros(24 << 20, dtype=torch.uint8)
    x[::4096] = 7
    assert send(pipes, x).advance(0)
    assert pipes[0].overflows.size < 2 * x.nbytes
    out = torch.empty_like(x)
    assert receive(pipes, out).advance(0)
    assert torch.equal(out, x)


def test_spills_that_wait_are_bounded(pipes: list[PeerPipes]) -> None:
    """Five of 16 MiB would be more than 64 MiB; one of any size may wait."""
    large = torch.zeros(16 << 20, dtype=torch.uint8)
    for _ in range(4):
        assert pipes[0].sends_eagerly(1, large.nbytes)
        assert send(pipes, large).advance(0)
    assert not pipes[0].sends_eagerly(1, large.nbytes)
    fifth = send(pipes, large)
    assert not fifth.advance(0)
    assert not fifth.ready()
    assert pipes[0].overflows.waiting <= EAGER_BYTES
    assert pipes[0].sends_eagerly(1, SMALL_BYTES), "small messages go on"
    for _ in range(4):
        assert receive(pipes, torch.empty_like(large)).advance(0)
    assert fifth.ready()
    assert fifth.advance(0)
    assert receive(pipes, torch.empty_like(large)).advance(0)


@on_ranks(2)
def test_more_messages_than_a_pipe_holds_wait_in_the_background(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    count = 2 * RING_BYTES // (2 * HEADER_BYTES) + 3
    with make_comm(rank, board, path) as comm:
        if rank == 0:
            works = [comm.isend(torch.tensor([number]), 1) for number in range(count)]
            comm.barrier()
            for work in works:
                work.wait()
            assert all(work.is_completed() for work in works)
        else:
            comm.barrier()
            got = [int(comm.recv((1,), torch.int64, 0)) for _ in range(count)]
            assert got == list(range(count))
