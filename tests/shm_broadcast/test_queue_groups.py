"""Queues over process groups: torch's, and ones that only move small objects."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shm_broadcast import (
    ForeignMemoryError,
    GroupTimeoutError,
    MessageDecodeError,
    MessageQueue,
    Segment,
    SharedMemoryError,
)
from shm_broadcast import segment as segment_module
from shm_broadcast.queue import message_queue
from shm_broadcast.queue.rendezvous import as_object_group
from shm_broadcast.queue.torch_rendezvous import decode, encode
from tests.ranks import init_gloo, run_ranks
from tests.shm_broadcast.leaks import open_descriptors
from tests.shm_broadcast.members import LIMIT
from tests.shm_broadcast.remote_peers import SECRET


class StoreGroup:
    """A stateless group over a store, without a default process group."""

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


def barrier(group: Any) -> None:
    if isinstance(group, dist.ProcessGroup):
        dist.barrier(group)
    else:
        group.all_gather_obj(None)


class FakeGroup:
    """Rank 0 of a group whose other ranks send the same; it breaks after ``left`` objects."""

    rank = 0

    def __init__(self, world_size: int, left: float = math.inf) -> None:
        self.world_size, self.left = world_size, left

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        return self.all_gather_obj(obj)[src]

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the store has gone")
        return [obj] * self.world_size


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


# --- what the ranks of a group make together -------------------------------------------------


def meet(rank: int, n: int, path: str, kind: str) -> None:
    group = init_gloo(rank, n, path) if kind == "gloo" else StoreGroup(rank, n, path)
    every_rank_writes(rank, n, group)
    an_outsider_writes(rank, n, group)
    one_rank_reads(rank, n, group)
    a_failure_is_raised_on_all_ranks(rank, group)
    all_are_closed_after_a_timeout(group)
    wrong_ranks_are_refused(n, group)


@pytest.mark.parametrize("kind", ["gloo", "store"])
def test_queues_of_a_group(kind: str, store_path: str) -> None:
    run_ranks(3, meet, store_path, kind)


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


def an_outsider_writes(rank: int, n: int, group: Any) -> None:
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


def a_failure_is_raised_on_all_ranks(rank: int, group: Any) -> None:
    """On one rank there is no memory, or none of the group's; on all a type is unknown."""

    def foreign(_handle: Any) -> Any:
        raise ForeignMemoryError("memory of pid 7")

    make, single = (
        MessageQueue.create_from_process_group,
        MessageQueue.create_from_process_group_single_reader,
    )
    with pytest.MonkeyPatch.context() as patch:
        for left in (1 << 16, 0):
            if rank == 1:
                patch.setattr(segment_module, "_free_bytes", lambda *_, left=left: left)
            with pytest.raises(SharedMemoryError, match="are free"):
                make(group, writer_rank=1)
            with pytest.raises(SharedMemoryError, match="are free"):
                single(group, reader_rank=left and 1)
            barrier(group)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Segment, "attach", foreign)
        with pytest.raises(ForeignMemoryError, match="of pid 7"):
            make(group)
    barrier(group)
    for each in (make, single):
        with pytest.raises(TypeError, match="not supported"):
            each(group, type=barrier)
    barrier(group)


def all_are_closed_after_a_timeout(group: Any) -> None:
    shutdown, closed = MessageQueue.shutdown, []

    def late(self: MessageQueue, timeout: Any = None) -> None:
        barrier(group)  # all have attached
        raise GroupTimeoutError("wait_until_ready", 0.0)

    def counted(self: MessageQueue) -> None:
        closed.append(self)
        shutdown(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageQueue, "wait_until_ready", late)
        patch.setattr(MessageQueue, "shutdown", counted)
        with pytest.raises(GroupTimeoutError):
            MessageQueue.create_from_process_group(group, 1 << 16)
        with pytest.raises(GroupTimeoutError):
            MessageQueue.create_from_process_group_single_reader(group, 1 << 16, blocking=True)
    assert len(closed) == 2
    barrier(group)


def wrong_ranks_are_refused(n: int, group: Any) -> None:
    for wrong in (-1, n):
        with pytest.raises(ValueError, match="writer_rank"):
            MessageQueue.create_from_process_group(group, writer_rank=wrong)
        with pytest.raises(ValueError, match="reader_rank"):
            MessageQueue.create_from_process_group_single_reader(group, reader_rank=wrong)


# --- groups of fake exchanges ----------------------------------------------------------------


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
        make(FakeGroup(2, left))
    assert len(closed) == (left == 2)
    closed.clear()
    assert open_descriptors() == before


def test_the_queue_of_a_group_of_one() -> None:
    with MessageQueue.create_from_process_group(FakeGroup(1)) as queue:
        assert queue.is_writer
        assert queue.broadcast_object({"a": 1}) == {"a": 1}
    queue, (handle,) = MessageQueue.create_from_process_group_single_reader(FakeGroup(1))
    with queue, MessageQueue.create_from_handle(handle, 0) as reader:
        queue.enqueue("to myself")
        assert reader.dequeue(LIMIT) == "to myself"


def test_the_only_reader_joins_as_0_and_errors_have_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_queue, "ranks_beside", lambda *_: ())
    queue, _ = MessageQueue.create_from_process_group_single_reader(
        FakeGroup(2), reader_rank=1, connect_ip="127.0.0.1", secret=SECRET
    )
    with queue:
        with pytest.raises(GroupTimeoutError, match=r"rank 1 \(never joined\)"):
            queue.wait_until_ready(0)
        with MessageQueue.create_from_handle(queue.export_handle(), 0, secret=SECRET) as reader:
            queue.enqueue("here", LIMIT)
            assert reader.dequeue(LIMIT) == "here"
        with pytest.raises(ValueError, match="rank 2 is no reader"):
            MessageQueue.create_from_handle(queue.export_handle(), 2, secret=SECRET)


# --- no value is unpickled -------------------------------------------------------------------


def test_values_of_a_rendezvous_arrive_unchanged() -> None:
    segment = Segment.create(1, "test")
    with MessageQueue(1, 1) as queue:
        for value in (None, True, False, segment.handle(), queue.export_handle()):
            assert decode(encode(value)) == value
            assert type(decode(encode(value))) is type(value)
    segment.close()
    errors = (
        TypeError("w"),
        ValueError("x"),
        OSError("y"),
        SharedMemoryError("z"),
        ForeignMemoryError("of another"),
        FileNotFoundError("a kind of OSError"),
    )
    for error in errors:
        found = decode(encode(error))
        assert isinstance(error, type(found))
        assert str(found) == str(error)
    with pytest.raises(TypeError, match="does not move a set"):
        encode({1})


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x91\x05", pickle.dumps({1: 2})])
def test_other_values_are_refused(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not what a rendezvous moves"):
        decode(data)


def pickles_among_handles(rank: int, n: int, path: str, folder: str) -> None:
    """Rank 0 sends a pickle instead."""
    init_gloo(rank, n, path)
    group = dist.group.WORLD
    assert group is not None
    bomb = Path(folder) / "bomb"
    if rank == 0:
        forged = pickle.dumps(Bomb(str(bomb)))
        with mock.patch("shm_broadcast.queue.torch_rendezvous.encode", return_value=forged):
            as_object_group(group).broadcast_obj(None, 0)
    else:
        with pytest.raises(MessageDecodeError, match="not what a rendezvous moves"):
            MessageQueue.create_from_process_group(group)
    assert not bomb.exists()


def test_a_pickle_among_handles_is_not_run(store_path: str, tmp_path: Path) -> None:
    run_ranks(2, pickles_among_handles, store_path, str(tmp_path))
