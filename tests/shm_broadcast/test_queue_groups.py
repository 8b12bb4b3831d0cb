"""Queues over process groups: torch's, and ones that only move small objects."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shm_broadcast import (
    ForeignMemoryError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
    SharedMemoryError,
)
from shm_broadcast import segment as segment_module
from shm_broadcast.segment import Segment
from tests.ranks import init_gloo, run_ranks
from tests.shm_broadcast.leaks import open_descriptors
from tests.shm_broadcast.members import LIMIT, kill
from tests.shm_broadcast.remote_peers import get, put


class StoreGroup:
    """The verbs of a stateless group over a store: no default process group is needed."""

    def __init__(self, rank: int, world_size: int, path: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = dist.FileStore(path, world_size)
        self._turn = 0

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        self._turn += 1
        if self.rank == src:
            self._store.set(f"{self._turn}/{src}", pickle.dumps(obj))
            return obj
        return pickle.loads(self._store.get(f"{self._turn}/{src}"))

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self._turn += 1
        self._store.set(f"{self._turn}/{self.rank}", pickle.dumps(obj))
        return [
            pickle.loads(self._store.get(f"{self._turn}/{rank}")) for rank in range(self.world_size)
        ]


def make_group(kind: str, rank: int, n: int, path: str) -> Any:
    return init_gloo(rank, n, path) if kind == "gloo" else StoreGroup(rank, n, path)


def meet(rank: int, n: int, path: str, kind: str) -> None:
    group = make_group(kind, rank, n, path)
    every_rank_writes(rank, n, group)
    an_outsider_writes(rank, n, group, path)
    one_rank_reads(rank, n, group)
    one_rank_cannot(rank, n, group)
    a_type_that_nobody_knows(group)
    one_rank_is_offered_what_is_not_the_groups(rank, group)
    some_do_not_come(rank, n, group)
    wrong_ranks(group)


def every_rank_writes(rank: int, n: int, group: Any) -> None:
    for writer_rank in range(n):
        queue = MessageQueue.create_from_process_group(
            pg=group,
            max_chunk_bytes=1 << 16,
            max_chunks=2,
            writer_rank=writer_rank,
            external_writer_handle=None,
            blocking=True,
        )
        assert queue.is_writer == (rank == writer_rank)
        messages: list[Any] = ["small", b"x" * 400_000, list(range(1000))]
        for message in messages:
            got = queue.broadcast_object(message if rank == writer_rank else None, LIMIT)
            assert got == message
        tensor = torch.arange(100_000)
        got = queue.broadcast_object(tensor if rank == writer_rank else None, LIMIT)
        assert torch.equal(got, tensor)
        barrier(group)
        queue.shutdown()


def an_outsider_writes(rank: int, n: int, group: Any, path: str) -> None:
    """All ranks read; one of them made the writing end, as a driver outside the group would."""
    writer = MessageQueue(n, n) if rank == 0 else None
    queue = MessageQueue.create_from_process_group(
        group,
        writer_rank=0,
        external_writer_handle=None if writer is None else writer.export_handle(),
        blocking=False,
    )
    assert not queue.is_writer
    if writer is not None:
        writer.wait_until_ready(LIMIT)
        writer.enqueue({"from": "outside"})
    assert queue.dequeue(LIMIT) == {"from": "outside"}
    barrier(group)
    queue.shutdown()
    if writer is not None:
        writer.shutdown()


def one_rank_reads(rank: int, n: int, group: Any) -> None:
    for reader_rank in range(n):
        mine, handles = MessageQueue.create_from_process_group_single_reader(
            group, 1 << 16, 1, reader_rank=reader_rank, blocking=False
        )
        assert len(handles) == (n if rank == reader_rank else 0)
        readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
        mine.wait_until_ready(LIMIT)
        mine.enqueue(rank)
        assert [reader.dequeue(LIMIT) for reader in readers] == list(range(n if readers else 0))
        barrier(group)
        with pytest.raises(GroupTimeoutError, match=rf"rank {reader_rank} \(pid"):
            mine.enqueue(b"x" * (1 << 20), timeout=0)
        barrier(group)
        for queue in (mine, *readers):
            queue.shutdown()


def one_rank_cannot(rank: int, n: int, group: Any) -> None:
    """What fails on one rank is raised on all, and leaves none waiting for the others."""
    free = segment_module._free_bytes
    for left in (1 << 16, 0):
        if rank == 1:
            segment_module._free_bytes = lambda *_, left=left: left
        try:
            with pytest.raises(SharedMemoryError, match="are free"):
                MessageQueue.create_from_process_group(group, writer_rank=1)
            with pytest.raises(SharedMemoryError, match="are free"):
                MessageQueue.create_from_process_group_single_reader(group, reader_rank=left and 1)
        finally:
            segment_module._free_bytes = free
        barrier(group)


def a_type_that_nobody_knows(group: Any) -> None:
    """Also what is raised before there is a queue is raised on all."""
    with pytest.raises(TypeError, match="not supported"):
        MessageQueue.create_from_process_group(group, type=barrier)
    with pytest.raises(TypeError, match="not supported"):
        MessageQueue.create_from_process_group_single_reader(group, type=barrier)
    barrier(group)


def one_rank_is_offered_what_is_not_the_groups(rank: int, group: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Segment, "attach", foreign)
        with pytest.raises(ForeignMemoryError, match="of pid 7"):
            MessageQueue.create_from_process_group(group)
    barrier(group)


def foreign(_handle: Any) -> Any:
    raise ForeignMemoryError("memory of pid 7")


class Breaking:
    """A group whose exchange breaks after so many more objects."""

    rank, world_size = 0, 2

    def __init__(self, left: int) -> None:
        self.left = left

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        assert src == self.rank
        self._pass()
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self._pass()
        return [obj, True]

    def _pass(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the store has gone")


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize(
    "make",
    [
        MessageQueue.create_from_process_group,
        MessageQueue.create_from_process_group_single_reader,
    ],
)
def test_a_broken_exchange_leaves_no_queue_open(
    make: Any, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown, closed, before = MessageQueue.shutdown, [], open_descriptors()

    def noted(self: MessageQueue) -> None:
        closed.append(self)
        shutdown(self)

    monkeypatch.setattr(MessageQueue, "shutdown", noted)
    with pytest.raises(ConnectionError):
        make(Breaking(left))
    assert len(closed) == (left == 2)
    closed.clear()
    assert open_descriptors() == before


def some_do_not_come(rank: int, n: int, group: Any) -> None:
    """Nobody is left with a queue that he was never given."""
    wait, shutdown, closed = MessageQueue.wait_until_ready, MessageQueue.shutdown, []

    def late(self: MessageQueue, timeout: Any = None) -> None:
        barrier(group)  # all have attached
        raise GroupTimeoutError("wait_until_ready", 0.0)

    def counted(self: MessageQueue) -> None:
        closed.append(self)
        shutdown(self)

    MessageQueue.wait_until_ready, MessageQueue.shutdown = late, counted
    try:
        with pytest.raises(GroupTimeoutError):
            MessageQueue.create_from_process_group(group, 1 << 16)
        with pytest.raises(GroupTimeoutError):
            MessageQueue.create_from_process_group_single_reader(group, 1 << 16, blocking=True)
    finally:
        MessageQueue.wait_until_ready, MessageQueue.shutdown = wait, shutdown
    assert len(closed) == 2
    barrier(group)


def wrong_ranks(group: Any) -> None:
    for wrong in (-1, group.size() if isinstance(group, dist.ProcessGroup) else group.world_size):
        with pytest.raises(ValueError, match="writer_rank"):
            MessageQueue.create_from_process_group(group, writer_rank=wrong)
        with pytest.raises(ValueError, match="reader_rank"):
            MessageQueue.create_from_process_group_single_reader(group, reader_rank=wrong)


def barrier(group: Any) -> None:
    if isinstance(group, dist.ProcessGroup):
        dist.barrier(group)
    else:
        group.all_gather_obj(None)


@pytest.mark.parametrize("kind", ["gloo", "store"])
def test_queues_of_a_group(kind: str, store_path: str) -> None:
    run_ranks(3, meet, store_path, kind)


def lose_the_writer(rank: int, n: int, path: str) -> None:
    folder = str(Path(path).parent)
    group = StoreGroup(rank, n, path)
    put(folder, f"pid {rank}", os.getpid())
    queue = MessageQueue.create_from_process_group(group, writer_rank=2)
    barrier(group)  # the writer is there until both readers have joined
    if rank == 2:
        get(folder, "never")
    if rank == 0:
        kill(folder, 2)
    with pytest.raises(PeerLostError) as caught:
        queue.dequeue(LIMIT)
    assert (caught.value.rank, caught.value.pid) == (2, get(folder, "pid 2"))
    queue.shutdown()


def test_a_lost_writer_is_named_by_its_rank_in_the_group(store_path: str) -> None:
    run_ranks(3, lose_the_writer, store_path, may_die=[2])
