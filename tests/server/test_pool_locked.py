"""A pool on one host: nobody but its own processes can reach it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from server.pool import WorkerPool
from tests.intruder import intruder
from tests.netns import isolate
from tests.ranks import run_ranks
from tests.sockets import reachable_sockets

if TYPE_CHECKING:
    from server.worker import WorkerContext


MEMBER = "tests.server.test_pool_locked:Member"


class Member:
    """Uses every group, and torch's process groups only when it is told to."""

    def __init__(self, context: WorkerContext) -> None:
        self.groups = context.groups

    def use(self) -> tuple[int, str, float]:
        groups = self.groups
        total = groups.world.all_reduce(torch.ones(3))
        groups.tp.broadcast_object({"rank": groups.rank})
        groups.pp.all_gather_object(groups.rank)
        groups.tp.broadcast_tensor_dict({"a": torch.ones(2), "b": {1, 2}})
        with groups.tp.create_mq_broadcaster() as queue:
            if groups.tp.is_first_rank:
                queue.enqueue("hello")
            else:
                queue.dequeue(timeout=60)
        groups.world.barrier()
        return os.getpid(), groups.world.device_communicator.capabilities.backend, float(total[0])

    def use_torch(self) -> float:
        # Not what this host's name stands for, which may be an address of the network.
        assert self.groups.tp._context.settings.sockets.address == "127.0.0.1"
        x = torch.ones(2)
        dist.all_reduce(x, group=self.groups.pp.cpu_group)
        dist.all_reduce(x, group=self.groups.tp.device_group)
        return float(x[0])


def test_nobody_can_reach_a_pool_on_the_cpu() -> None:
    before = reachable_sockets(os.getpid())
    with WorkerPool(Member, tp=2, pp=2) as pool:
        for pid, backend, total in pool.collective_rpc("use", timeout=120):
            assert (backend, total) == ("shm", 4.0)
            assert reachable_sockets(pid) == set()
        assert reachable_sockets(os.getpid()) <= before


def test_torchs_process_groups_are_there_for_who_asks() -> None:
    with WorkerPool(Member, tp=2, pp=2) as pool:
        assert pool.collective_rpc("use_torch", timeout=120) == [4.0] * 4
        pids = [pid for pid, *_ in pool.collective_rpc("use", timeout=120)]
        for pid in pids:
            opened = reachable_sockets(pid)
            assert opened
            assert all(each.startswith("tcp 0100007F:") for each in opened), opened


def start_under_attack(_rank: int, _n: int) -> tuple[list[str], int]:
    isolate()
    with intruder() as report, WorkerPool(MEMBER, tp=2) as pool:
        for _, backend, total in pool.collective_rpc("use", timeout=120):
            assert (backend, total) == ("shm", 2.0)
    return report.touched, report.looks


@pytest.mark.namespaces
@pytest.mark.parametrize("_turn", range(5))
def test_another_user_can_do_nothing_to_a_pool_that_starts(_turn: int) -> None:
    """He read and rewrote the store where workers met, and had his pickle run."""
    (outcome,) = run_ranks(1, start_under_attack, timeout=240)
    touched, looks = outcome
    assert looks > 0
    assert touched == []
