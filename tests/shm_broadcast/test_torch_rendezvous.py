"""What sets up a queue over a torch process group: handles, and nothing that is unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shm_broadcast import (
    ForeignMemoryError,
    MessageDecodeError,
    MessageQueue,
    Segment,
    SharedMemoryError,
)
from shm_broadcast.queue.rendezvous import as_object_group
from shm_broadcast.queue.torch_rendezvous import decode, encode
from tests.ranks import init_gloo, run_ranks


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_what_travels_arrives_as_it_was() -> None:
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
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not what a rendezvous moves"):
        decode(data)


def pickles_among_handles(rank: int, n: int, path: str, folder: str) -> None:
    """Rank 0 plays who sits between: what it sends is a pickle."""
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


def carried(rank: int, n: int, path: str) -> Any:
    init_gloo(rank, n, path)
    group = dist.group.WORLD
    assert group is not None
    with MessageQueue.create_from_process_group(group, writer_rank=1, timeout=30) as queue:
        return queue.broadcast_object("hello" if rank == 1 else None, 30)


def test_a_queue_over_a_process_group(store_path: str) -> None:
    assert run_ranks(3, carried, store_path) == ["hello"] * 3


def test_a_pickle_in_its_place_is_not_run(store_path: str, tmp_path: Path) -> None:
    run_ranks(2, pickles_among_handles, store_path, str(tmp_path))
