"""Groups of a pool's workers: their ranks, who can reach them, groups with other processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import coordinator
from coordinator import ParallelGroups, StatelessGroupCoordinator
from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerLostError, WorkerStartError
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast import MemberStatus, PeerLostError
from tests.intruder import intruder
from tests.netns import isolate, two_hosts
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts
from tests.sockets import reachable_sockets

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext


class Placed:
    def __init__(self, context: WorkerContext) -> None:
        self.groups = context.groups

    def restore(self, context: WorkerContext) -> None:
        self.groups = context.groups

    def rank(self) -> int:
        return self.groups.rank

    def members(self) -> dict[str, list[int]]:
        groups = {name: getattr(self.groups, name) for name in ("tp", "pcp", "dcp", "pp", "dp")}
        found = {}
        for name, group in {**groups, **self.groups.axes}.items():
            found[name] = group.ranks
            mine = torch.tensor([float(self.groups.rank)])
            assert group.all_reduce(mine).item() == sum(group.ranks)
        return found


CFG = [
    {"cfg": [0, 4], "pcp": [0, 2], "tp": [0, 1], "dcp": [0, 2]},
    {"cfg": [1, 5], "pcp": [1, 3], "tp": [0, 1], "dcp": [1, 3]},
    {"cfg": [2, 6], "pcp": [0, 2], "tp": [2, 3], "dcp": [0, 2]},
    {"cfg": [3, 7], "pcp": [1, 3], "tp": [2, 3], "dcp": [1, 3]},
    {"cfg": [0, 4], "pcp": [4, 6], "tp": [4, 5], "dcp": [4, 6]},
    {"cfg": [1, 5], "pcp": [5, 7], "tp": [4, 5], "dcp": [5, 7]},
    {"cfg": [2, 6], "pcp": [4, 6], "tp": [6, 7], "dcp": [4, 6]},
    {"cfg": [3, 7], "pcp": [5, 7], "tp": [6, 7], "dcp": [5, 7]},
]
"""Of ``axes={"cfg": 2}, pcp=2, dcp=2, tp=2``, worked out by hand: rank = (cfg * 2 + pcp) * 2 + tp;
ranks that share contexts are counted with pcp fastest."""


def found_in(pool: WorkerPool) -> list[dict[str, list[int]]]:
    found = pool.collective_rpc("members")
    for rank, groups in enumerate(found):
        assert groups.pop("pp") == groups.pop("dp") == [rank]
    return found


def test_workers_have_the_groups_of_all_axes_also_after_a_restart() -> None:
    with WorkerPool(Placed, axes={"cfg": 2}, pcp=2, dcp=2, tp=2, restart="worker") as pool:
        assert repr(pool).endswith("test_pool_groups:Placed, cfg=2 x dp=1 x pp=1 x pcp=2 x tp=2)")
        assert found_in(pool) == CFG
        pid = pool.status()[5].pid
        title = psutil.Process(pid).cmdline()[0]
        assert title.startswith("group-coordinator worker 5 cfg1 pcp0 tp1")
        os.kill(pid, signal.SIGKILL)
        until(lambda: pool.generation == 2 and pool.restarting is None)
        assert found_in(pool) == CFG


def test_any_mapping_names_axes_by_any_printable_text_with_sizes_of_numpy() -> None:
    axes = MappingProxyType({"rank": 1, "größe {0}": np.int64(2), "all": np.int32(1)})
    with WorkerPool(Placed, axes=axes) as pool:
        assert pool.grid.own_axes == {"rank": 1, "größe {0}": 2, "all": 1}
        members = pool.collective_rpc("members")
        assert [each["größe {0}"] for each in members] == [[0, 1]] * 2
        assert [each["rank"] for each in members] == [[0], [1]]
        assert [each["all"] for each in members] == [[0], [1]]


def test_one_result_is_that_of_the_first_rank_of_the_last_stage() -> None:
    with WorkerPool(Placed, axes={"cfg": 2}, pp=2) as pool:
        assert pool.call("rank") == 1
        assert pool.grid.coordinates(1) == {"cfg": 0, "dp": 0, "pp": 1, "pcp": 0, "tp": 0}


def test_each_replica_has_the_axes_and_ranks_are_counted_replica_by_replica() -> None:
    with Replicas(Placed, dp=2, axes={"cfg": 2}) as replicas:
        assert [found_in(pool) for pool in replicas.pools] == [
            [{"cfg": [0, 1], "pcp": [rank], "tp": [rank], "dcp": [rank]} for rank in range(2)]
        ] * 2
        assert replicas.grid.coordinates(3)["cfg"] == replicas.grid.coordinates(3)["dp"] == 1
        assert replicas.grid.coordinates(2)["cfg"] == 0


@pytest.mark.namespaces
def test_an_axis_of_ones_own_lies_between_hosts(tmp_path: Path) -> None:
    options = {"worker": Placed, "axes": {"cfg": 2}, "tp": 2}
    with two_hosts("IPv4") as hosts:
        found, end = run_ranks(2, over_hosts, str(tmp_path), hosts, found_in, (), options)
    assert [each["cfg"] for each in found] == [[0, 2], [1, 3]] * 2
    assert end[0] == "dismissed"


# Only the pool's own processes can reach its groups.


class Member:
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


def test_a_pool_on_the_cpu_opens_no_socket() -> None:
    before = reachable_sockets(os.getpid())
    with WorkerPool(Member, tp=2, pp=2) as pool:
        pids = []
        for pid, backend, total in pool.collective_rpc("use", timeout=120):
            assert (backend, total) == ("shm", 4.0)
            assert reachable_sockets(pid) == set()
            pids.append(pid)
        assert reachable_sockets(os.getpid()) <= before
        assert pool.collective_rpc("use_torch", timeout=120) == [4.0] * 4
        for pid in pids:
            opened = reachable_sockets(pid)
            assert opened
            assert all(each.startswith("tcp 0100007F:") for each in opened), opened


def start_under_attack(_rank: int, _n: int) -> tuple[list[str], int]:
    isolate()
    with intruder() as report, WorkerPool("tests.server.test_pool_groups:Member", tp=2) as pool:
        for _, backend, total in pool.collective_rpc("use", timeout=120):
            assert (backend, total) == ("shm", 2.0)
    return report.touched, report.looks


@pytest.mark.namespaces
def test_another_user_can_do_nothing_to_a_pool_that_starts() -> None:
    """He read and rewrote the store where workers met, and had his pickle run."""
    ((touched, looks),) = run_ranks(1, start_under_attack, timeout=240)
    assert looks > 0
    assert touched == []


# Workers in a group with processes of another pool or of none, such as a trainer's.

LARGE = 300_000
EXPECTED = [3.0, 0.0, 7.0, 3.0, 0.0, 7.0, {"step": 8}, 9.0]
GONE = PeerLostError("update all_gather", MemberStatus(0, 4242, "lost"))


def meet(rank: int, port: int, torch_only: bool = False, n: int = 3) -> ParallelGroups:
    """Join the driver, rank 0, and the workers, whose ranks are one higher than in their pool."""
    return coordinator.init(
        axes={"all": n},
        rank=rank,
        world_size=n,
        store=coordinator.connect_store("127.0.0.1", port),
        timeout=60,
        torch_only=torch_only,
        backend="gloo",
    )


def exchange(group: GroupCoordinator) -> list[Any]:
    found: list[Any] = []
    for count in (4, LARGE):
        found.append(group.all_reduce(torch.full((count,), 1.0))[-1].item())
        found.append(group.broadcast(torch.full((count,), float(group.rank)), src=0)[-1].item())
        sevens = torch.full((count,), 7.0)
        for _ in range(2):  # the second is a short message by then
            if group.is_first_rank:
                for peer in (1, 2):
                    group.send(sevens, dst=peer)
            else:
                sevens = group.recv((count,), torch.float32, src=0)
        found.append(sevens[-1].item())
    found.append(group.broadcast_object({"step": 8} if group.is_first_rank else None, src=0))
    nines: Any = {"w": torch.full((4,), 9.0)}
    if group.is_first_rank:
        for peer in (1, 2):
            group.send_tensor_dict(nines, dst=peer)
    else:
        nines = group.recv_tensor_dict(src=0)
    return [*found, nines["w"][-1].item()]


class Beside:
    def __init__(self, context: WorkerContext) -> None:
        self.restore(context)

    def restore(self, context: WorkerContext) -> None:
        self.tp = context.groups.tp

    def meet(self, port: int, torch_only: bool = False) -> None:
        self.met = meet(1 + self.tp.rank, port, torch_only)
        self.all = self.met.axes["all"]

    def exchange(self) -> list[Any]:
        self.tp.barrier()
        return exchange(self.all)

    def leave(self) -> None:
        self.met.close()

    def waits(self, rank: int, folder: str) -> None:
        if self.tp.rank == rank:
            Path(folder, f"waits {rank}").touch()
            time.sleep(PATIENCE_SECONDS)
        self.all.barrier()

    def turned(self, port: int) -> float:
        """The first rank sends to the second in a group that has them the other way round."""
        ranks = [1 - rank for rank in self.tp.ranks]
        with StatelessGroupCoordinator(
            *([ranks], 0, "gloo", True, coordinator.connect_store("127.0.0.1", port)),
            group_name="turned",
            global_rank=ranks[self.tp.rank_in_group],
        ) as group:
            if self.tp.is_first_rank:
                group.send(torch.full((4,), 5.0))
                return 5.0
            return group.recv((4,), torch.float32)[0].item()


@pytest.mark.parametrize("torch_only", [False, True], ids=["shared memory", "torch"])
def test_workers_exchange_with_processes_of_no_pool(torch_only: bool) -> None:
    store = coordinator.host_store()
    with WorkerPool(Beside, tp=2) as pool:
        met = pool.submit("meet", store.port, torch_only)
        with meet(0, store.port, torch_only) as groups:
            met.result(timeout=60)
            for _ in range(2):
                theirs = pool.submit("exchange")
                assert exchange(groups.axes["all"]) == EXPECTED
                assert theirs.result(timeout=60) == EXPECTED
            pool.call("leave", timeout=60)


def test_a_group_is_made_again_in_the_same_store_when_a_worker_was_replaced(
    tmp_path: Path,
) -> None:
    store = coordinator.host_store()
    with WorkerPool(Beside, tp=2, restart="worker") as pool:
        for lost in (0, 1):
            met = pool.submit("meet", store.port)
            with meet(0, store.port) as groups:
                met.result(timeout=60)
                theirs = pool.submit("exchange")
                assert exchange(groups.axes["all"]) == EXPECTED
                assert theirs.result(timeout=60) == EXPECTED
                late = pool.submit("waits", lost, str(tmp_path))
                until((tmp_path / f"waits {lost}").exists)
                os.kill(pool.status()[lost].pid, signal.SIGKILL)
                with pytest.raises(PeerLostError, match=f"lost rank {1 + lost} "):
                    groups.axes["all"].barrier()
                with pytest.raises(WorkerLostError) as raised:
                    late.result(timeout=60)
                assert raised.value.rank == lost


class Abandoned(Beside):
    def __init__(self, context: WorkerContext, made_in_vain: bool) -> None:
        if made_in_vain:
            raise GONE
        super().__init__(context)

    def restore(self, context: WorkerContext) -> None:
        super().restore(context)
        if hasattr(self, "made"):
            raise GONE
        self.made = context.generation

    def made_in(self) -> int:
        return self.made


@pytest.mark.parametrize("restart", ["never", "worker"])
def test_a_start_fails_at_once_with_what_workers_say_of_a_process_of_no_pool(restart: str) -> None:
    with pytest.raises(
        WorkerStartError, match=r"PeerLostError: update .* lost rank 0 \(pid 4242\)"
    ):
        WorkerPool(Abandoned, tp=2, restart=restart, worker_kwargs={"made_in_vain": True})


def test_workers_that_cannot_be_restored_for_a_process_of_no_pool_are_made_anew() -> None:
    with WorkerPool(
        Abandoned,
        tp=2,
        restart="worker",
        worker_kwargs={"made_in_vain": False},
        start_timeout=None,
    ) as pool:
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        until(lambda: pool.restarts == 1, "the restart waits for what never comes")
        assert pool.collective_rpc("made_in", 60) == [3, 3]


class Half:
    def __init__(self, context: WorkerContext) -> None:
        self.rank_here = context.groups.world.rank

    def rank(self) -> int:
        return self.rank_here

    def meet(self, rank: int, port: int) -> None:
        self.met = meet(rank, port, n=2)

    def sum(self) -> float:
        return self.met.axes["all"].all_reduce(torch.ones(LARGE))[-1].item()


def test_workers_of_two_pools_exchange_and_name_who_of_another_pool_is_late() -> None:
    store = coordinator.host_store()
    with (
        WorkerPool(Half, config=PoolConfig(name="one")) as one,
        WorkerPool(Half, config=PoolConfig(name="other")) as other,
    ):
        pools = (one, other)
        for _ in range(3):  # their calls have other numbers from here on
            one.call("rank", timeout=60)
        for call in [pool.submit("meet", rank, store.port) for rank, pool in enumerate(pools)]:
            call.result(timeout=60)
        for _ in range(3):
            calls = [pool.submit("sum") for pool in pools]
            assert [call.result(timeout=60) for call in calls] == [2.0, 2.0]
        pid = one.status()[0].pid
        late = other.submit("sum", timeout=0.8).exception()
        assert isinstance(late, CallTimeoutError)
        assert late.blocked_by == ()
        assert f"(rank 0 of one (pid {pid}) holds up others: it is idle" in str(late)
        one.call("sum", timeout=60)


def test_workers_may_be_numbered_otherwise_in_a_group_of_theirs() -> None:
    store = coordinator.host_store()
    with WorkerPool(Beside, tp=2) as pool:
        for _ in range(2):
            found = pool.collective_rpc("turned", 60, args=(store.port,))
            assert found == [5.0, 5.0]
