"""What groups had is freed with their last reference, since engines may collect no garbage."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
import torch

import coordinator
from benchmarks.memory import shared_bytes
from coordinator import call_counts
from tests.coordinator.hosts import groups_over
from tests.netns import two_hosts
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.netns import Host


def use(groups: coordinator.ParallelGroups, rank: int) -> None:
    tp, x = groups.tp, torch.ones(1000)
    tp.all_reduce(x)
    tp.all_reduce(x, async_op=True).wait()
    tp.all_gatherv(x, 0)
    if rank == 0:
        tp.isend(x, 1).wait()
        tp.send_tensor_dict({"x": x, "n": 1}, 1)
    else:
        tp.irecv(x.shape, x.dtype, 0).wait()
        tp.recv_tensor_dict(0)
    tp.broadcast_object({"n": 1} if rank == 0 else None)
    tp.barrier()


def make_and_leave(rank: int, n: int, path: str) -> tuple[int, int]:
    """Bytes of shared memory that are mapped at the end, and objects that operations have left to a
    collector.
    """
    gc.collect()
    gc.disable()
    for turn in range(2):
        store = torch.distributed.FileStore(f"{path}{turn}", n)
        with coordinator.init(tp=n, rank=rank, store=store) as groups:
            use(groups, rank)
            gc.collect()
            use(groups, rank)
            garbage = gc.collect()
        del groups
    assert not call_counts._entries
    return shared_bytes([os.getpid()]), garbage


def test_groups_and_operations_leave_nothing_to_a_garbage_collector(store_path: str) -> None:
    assert run_ranks(2, make_and_leave, store_path) == [(0, 0), (0, 0)]


def make_and_leave_between_hosts(rank: int, n: int, folder: str, hosts: tuple[Host, Host]) -> int:
    gc.collect()
    gc.disable()
    with groups_over(rank, n, folder, hosts) as groups:
        use(groups, rank)
    del groups
    return shared_bytes([os.getpid()])


@pytest.mark.namespaces
def test_groups_between_hosts_leave_no_memory_to_a_garbage_collector(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        left = run_ranks(2, make_and_leave_between_hosts, str(tmp_path), hosts)
    assert left == [0, 0]
