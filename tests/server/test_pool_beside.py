"""Workers in a group with processes that are none of their pool's, such as a trainer's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import ParallelGroups, StatelessGroupCoordinator
from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerLostError, WorkerStartError
from server.pool import WorkerPool
from shm_broadcast import MemberStatus, PeerLostError
from tests.patience import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from coordinator import GroupCoordinator
    from server.worker import WorkerContext

TP = 2
N = 1 + TP
LARGE = 300_000


def meet(rank: int, port: int, torch_only: bool) -> ParallelGroups:
    """Join the driver, rank 0, and the workers, whose ranks are one higher than in their pool."""
    return coordinator.init(
        axes={"all": N},
        rank=rank,
        world_size=N,
        store=coordinator.connect_store("127.0.0.1", port),
        timeout=60,
        torch_only=torch_only,
        backend="gloo",
    )


def exchange(group: GroupCoordinator) -> list[Any]:
    """All kinds of operations once, between the driver and all workers; returns what came."""
    found: list[Any] = []
    for count in (4, LARGE):
        found.append(group.all_reduce(torch.full((count,), 1.0))[-1].item())
        found.append(group.broadcast(torch.full((count,), float(group.rank)), src=0)[-1].item())
        if group.is_first_rank:
            for _ in range(2):  # the second takes the short way
                for peer in range(1, N):
                    group.send(torch.full((count,), 7.0), dst=peer)
            found.append(7.0)
        else:
            came = [group.recv((count,), torch.float32, src=0)[-1].item() for _ in range(2)]
            found.append(max(came))
    found.append(group.broadcast_object({"step": 8} if group.is_first_rank else None, src=0))
    if group.is_first_rank:
        for peer in range(1, N):
            group.send_tensor_dict({"w": torch.full((4,), 9.0)}, dst=peer)
        found.append(9.0)
    else:
        came_dict = group.recv_tensor_dict(src=0)
        assert came_dict is not None
        found.append(came_dict["w"][-1].item())
    return found


EXPECTED = [3.0, 0.0, 7.0, 3.0, 0.0, 7.0, {"step": 8}, 9.0]


class Beside:
    """Meets its driver in a group when it is told to."""

    def __init__(self, context: WorkerContext) -> None:
        self.restore(context)

    def restore(self, context: WorkerContext) -> None:
        self.tp = context.groups.tp

    def meet(self, port: int, torch_only: bool) -> None:
        self.met = meet(1 + self.tp.rank, port, torch_only)
        self.all = self.met.axes["all"]

    def exchange(self) -> list[Any]:
        self.tp.barrier()
        return exchange(self.all)

    def leave(self) -> None:
        self.met.close()

    def waits(self, rank: int, folder: str) -> None:
        """Rank ``rank`` does not come to a collective of the group until it is killed."""
        if self.tp.rank == rank:
            Path(folder, f"waits {rank}").touch()
            time.sleep(PATIENCE_SECONDS)
        self.all.barrier()

    def turned(self, port: int) -> float:
        """The first rank sends to the second in a group that has them the other way round."""
        ranks = [TP - 1 - rank for rank in self.tp.ranks]
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
    with WorkerPool(Beside, tp=TP) as pool:
        met = pool.submit("meet", store.port, torch_only)
        with meet(0, store.port, torch_only) as groups:
            met.result(timeout=60)
            for _ in range(3):
                theirs = pool.submit("exchange")
                assert exchange(groups.axes["all"]) == EXPECTED
                assert theirs.result(timeout=60) == EXPECTED
            pool.call("leave", timeout=60)


def test_a_group_is_made_again_in_the_same_store_when_a_worker_was_replaced(
    tmp_path: Path,
) -> None:
    store = coordinator.host_store()
    with WorkerPool(Beside, tp=TP, restart="worker") as pool:
        for lost in (0, 1):
            met = pool.submit("meet", store.port, False)
            with meet(0, store.port, False) as groups:
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


GONE = PeerLostError("update all_gather", MemberStatus(0, 4242, "lost"))


class Abandoned(Beside):
    """Finds at times that a process outside of the pool, which it was to meet, is gone."""

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
        WorkerPool(Abandoned, tp=TP, restart=restart, worker_kwargs={"made_in_vain": True})


def test_workers_that_cannot_be_restored_for_a_process_of_no_pool_are_made_anew() -> None:
    with WorkerPool(
        Abandoned,
        tp=TP,
        restart="worker",
        worker_kwargs={"made_in_vain": False},
        start_timeout=None,
    ) as pool:
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        until(lambda: pool.restarts == 1, "the restart waits for what never comes")
        assert pool.collective_rpc("made_in", 60) == [3, 3]


def test_workers_of_two_pools_exchange() -> None:
    store = coordinator.host_store()
    with WorkerPool(Half) as first, WorkerPool(Half) as second:
        pools = (first, second)
        for _ in range(3):  # their calls have other numbers from here on
            first.call("rank", timeout=60)
        calls = [pool.submit("meet", rank, store.port) for rank, pool in enumerate(pools)]
        assert [call.result(timeout=60) for call in calls] == [0, 1]
        for _ in range(3):
            calls = [pool.submit("sum") for pool in pools]
            assert [call.result(timeout=60) for call in calls] == [2.0, 2.0]


def test_a_late_call_names_who_of_another_pool_holds_it_up() -> None:
    store = coordinator.host_store()
    with (
        WorkerPool(Half, config=PoolConfig(name="one")) as one,
        WorkerPool(Half, config=PoolConfig(name="other")) as other,
    ):
        pools = (one, other)
        for call in [pool.submit("meet", rank, store.port) for rank, pool in enumerate(pools)]:
            call.result(timeout=60)
        pid = one.status()[0].pid
        late = other.submit("sum", timeout=0.8).exception()
        assert isinstance(late, CallTimeoutError)
        assert late.blocked_by == ()
        assert f"(rank 0 of one (pid {pid}) holds up others: it is idle" in str(late)
        one.call("sum", timeout=60)


class Half:
    """Meets the worker of another pool."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def rank(self) -> int:
        return self.context.groups.world.rank

    def meet(self, rank: int, port: int) -> int:
        store = coordinator.connect_store("127.0.0.1", port)
        self.met = coordinator.init(tp=2, rank=rank, store=store, timeout=60, backend="gloo")
        return self.met.rank

    def sum(self) -> float:
        return self.met.tp.all_reduce(torch.ones(LARGE))[-1].item()


def test_workers_may_be_numbered_otherwise_in_a_group_of_theirs() -> None:
    store = coordinator.host_store()
    with WorkerPool(Beside, tp=TP) as pool:
        for _ in range(2):
            found = pool.collective_rpc("turned", 60, args=(store.port,))
            assert found == [5.0, 5.0]
