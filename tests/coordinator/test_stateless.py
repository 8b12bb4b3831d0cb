"""Groups without a default process group: grown, shrunk, and remade after a death."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from coordinator import StatelessGroupCoordinator
from coordinator.compat.vllm.utils import StatelessProcessGroup
from shm_broadcast import CoordinatorError, GroupAbortedError, GroupTimeoutError, PeerLostError
from tests.patience import STALL_SECONDS, all_here
from tests.ranks import run_ranks
from tests.shared_store import SharedStore


def create(path: Path, rank: int, n: int, name: str = "", **options: Any) -> StatelessProcessGroup:
    """A group that meets at a port which rank 0 was given by the system."""
    told, listener = dist.FileStore(str(path / f"port {name}"), n), None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        told.set("port", str(listener.getsockname()[1]))
    port = int(told.get("port"))
    return StatelessProcessGroup.create(
        "127.0.0.1", port, rank, n, listen_socket=listener, **options
    )


def objects_and_tensors(rank: int, n: int, path: Path) -> None:
    with create(path, rank, n) as group:
        assert (group.rank, group.world_size) == (rank, 3)
        for src in range(n):
            assert group.broadcast_obj({"from": rank} if rank == src else None, src) == {
                "from": src
            }
            sent = torch.full((src + 1, 2), float(src), dtype=torch.float16)
            found = group.broadcast(sent if rank == src else None, src)
            assert torch.equal(found, sent)
            assert (found is sent) == (rank == src)
        assert group.all_gather_obj("x" * rank) == ["", "x", "xx"]
        # two senders to one: their messages do not mix
        if rank == 0:
            assert [group.recv_obj(2), group.recv_obj(1), group.recv_obj(1)] == [2, 1, "again"]
            out = torch.empty(4, dtype=torch.int64)
            assert group.recv(out, 2) is out
            assert out.tolist() == [0, 1, 2, 3]
        else:
            group.send_obj(rank, 0)
            if rank == 1:
                group.send_obj("again", 0)
            else:
                group.send(torch.arange(4), 0)
        x = torch.tensor([rank + 1])
        assert group.all_reduce(x).item() == 6
        assert group.all_reduce(x, dist.ReduceOp.MAX).item() == 3
        assert x.item() == rank + 1
        group.barrier()
        assert not dist.is_initialized()
    group.close()
    # rank 0 is in two groups
    if rank in (0, 1):
        first = create(path, rank, 2, "a")
    if rank in (0, 2):
        second = create(path, rank // 2, 2, "b")
    if rank == 0:
        assert first.all_gather_obj(rank) == [0, 1]
        assert second.all_gather_obj(rank) == [0, 2]
        first.close()
        second.close()
    else:
        (first if rank == 1 else second).all_gather_obj(rank)


def test_groups_move_objects_and_tensors(tmp_path: Path) -> None:
    run_ranks(3, objects_and_tensors, tmp_path)


def fails(rank: int, n: int, path: Path) -> str:
    if rank == 0:
        with pytest.raises(GroupTimeoutError) as absent:
            create(path, rank, 3, "absent", store_timeout=0.4)
        assert [member.rank for member in absent.value.waiting_for] == [1, 2]
    if rank == 1:
        with pytest.raises(ValueError, match="layer 3"), create(path, rank, n):
            raise ValueError("layer 3 is missing")
        return ""
    with pytest.raises(CoordinatorError) as caught, create(path, rank, n) as group:
        group.all_reduce(torch.ones(2))
    return str(caught.value)


def test_absent_members_are_named_and_errors_reach_the_others(tmp_path: Path) -> None:
    first, _, last = run_ranks(3, fails, tmp_path)
    assert all("rank 1" in text and "layer 3 is missing" in text for text in (first, last))


def build(rank: int, store: Store, ranks: list[int], **options: Any) -> StatelessGroupCoordinator:
    named: dict[str, Any] = {"group_name": "tp", "global_rank": rank, "timeout": 20}
    return StatelessGroupCoordinator([ranks], rank, "gloo", True, store, **named, **options)


def grow_and_shrink(rank: int, n: int, store: Store) -> None:
    """[0, 1] → [0, 1, 2] → [0, 2] → [0, 1, 2] again; rank 2 comes later."""
    one = torch.ones(1)
    if rank < 2:
        pair = build(rank, store, [0, 1], use_message_queue_broadcaster=True)
        assert pair.all_reduce(one).item() == 2
        assert pair.broadcast_object("x" if rank == 0 else None) == "x"
        three = pair.resized([[0, 1, 2]])
        assert pair.all_reduce(one).item() == 2
        pair.close()
    else:
        time.sleep(0.3)
        three = build(rank, store, [0, 1, 2], use_message_queue_broadcaster=True)
    assert three.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]
    assert three.broadcast_object(rank if rank == 0 else None) == 0
    if rank != 1:
        ends = three.resized([[0, 2]])
        assert ends.all_gather(torch.tensor([rank])).tolist() == [0, 2]
        assert (ends.rank, ends.rank_in_group) == (rank, rank // 2)
    again = three.resized([[0, 1, 2]])
    assert again.all_reduce(one).item() == 3
    again.barrier()
    assert not dist.is_initialized()
    for group in (again, three):
        group.close()
    if rank != 1:
        ends.close()


def test_groups_grow_and_shrink() -> None:
    run_ranks(3, grow_and_shrink, SharedStore())


def remade(rank: int, n: int, store: Store) -> None:
    """Rank 2, which is rank 1 of its group, is killed; errors name it, the others go on."""
    if rank == 0:
        return
    group = build(rank, store, [1, 2, 3])
    all_here(store, 3)
    if rank == 2:
        store.set("killed", repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((PeerLostError, GroupAbortedError), match="rank 2 ") as raised:
        group.all_reduce(torch.ones(1))
    assert time.monotonic() - float(store.get("killed")) < 1 + STALL_SECONDS
    error: Any = raised.value
    assert (error.rank if isinstance(error, PeerLostError) else error.failure.culprit) == 2
    if rank == 1:
        with pytest.raises(GroupTimeoutError, match="rank 2"):
            group.resized([[1, 2]], timeout=0.2)
    left = group.resized([[1, 3]])
    group.close()
    assert left.all_reduce(torch.tensor([rank])).item() == 4
    left.barrier()
    left.close()


def test_a_group_is_remade_without_a_dead_member() -> None:
    run_ranks(4, remade, SharedStore(), may_die=[2])
