"""A rank that calls a collective with something else than the others: no call returns an answer."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import coordinator
from device_comm import ReduceOp, divergence
from server.errors import CallDivergedError, WorkerError, WorkerLostError
from server.pool import WorkerPool
from shm_broadcast import DivergenceError, GroupAbortedError
from shm_broadcast.state.fingerprint import Fingerprints
from tests.netns import two_hosts
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext


def dtype(world: GroupCoordinator, odd: bool) -> Any:
    return world.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))


def shape(world: GroupCoordinator, odd: bool) -> Any:
    return world.all_reduce(torch.ones((2, 4) if odd else (4, 2)))


def reduction(world: GroupCoordinator, odd: bool) -> Any:
    return world.all_reduce(torch.ones(4), op=ReduceOp.MAX if odd else ReduceOp.MIN)


def order(world: GroupCoordinator, odd: bool) -> Any:
    """The ranks begin as many collectives of each verb, in another order."""
    dtypes = (torch.int32, torch.float32)
    return [world.all_reduce(torch.ones(4, dtype=each)) for each in dtypes[:: -1 if odd else 1]]


def size(world: GroupCoordinator, odd: bool) -> Any:
    """Gloo aborts the process of a rank that receives more bytes than it expects."""
    return world.all_reduce(torch.ones(8 if odd else 4))


def size_before_another(world: GroupCoordinator, odd: bool) -> Any:
    """The odd rank has sent its data, and goes on, when another process is aborted."""
    world.broadcast(torch.ones(8 if odd else 4), 0)
    return world.all_reduce(torch.ones(1))


def death(world: GroupCoordinator, odd: bool) -> Any:
    """A process is killed before a collective in which the others wait for it."""
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.all_reduce(torch.ones(4))


SLIPS: Final[dict[str, Any]] = {each.__name__: each for each in (dtype, shape, reduction, order)}
ENDING: Final = {each.__name__: each for each in (size, size_before_another, death)}
NAMED: Final = {
    "dtype": (
        "began all_reduce SUM float32[4] (collective 2)",
        "began all_reduce SUM int32[4] (collective 2)",
    ),
    "shape": (
        "began all_reduce SUM float32[4, 2] (collective 2)",
        "began all_reduce SUM float32[2, 4] (collective 2)",
    ),
    "reduction": (
        "began all_reduce MIN float32[4] (collective 2)",
        "began all_reduce MAX float32[4] (collective 2)",
    ),
    "order": (
        "began all_reduce SUM int32[4] (collective 2)",
        "began all_reduce SUM float32[4] (collective 2)",
    ),
}
"""What the error says of a rank and of the odd one, which slips in its second collective."""


def compare_no_more() -> None:
    """Only the pool compares: in its first collective a rank does so itself, and then not."""
    divergence.LOOK_SECONDS = 1e9  # type: ignore[misc]
    Fingerprints.local_entry = lambda *_: 0


class Slipping:
    """Its ranks meet over torch's process groups; those do not compare what a rank calls."""

    def __init__(self, context: WorkerContext, port: int = 0) -> None:
        self.rank = context.groups.world.rank
        self.world = context.groups.world
        if port:
            self.world = coordinator.init(
                tp=self.world.world_size,
                rank=self.rank,
                store=coordinator.connect_store("127.0.0.1", port),
                board=self.world.board,
                torch_only=True,
                backend="gloo",
                timeout=PATIENCE_SECONDS,
            ).world
            compare_no_more()
            self.world.barrier()

    def step(self, what: str, odd: int) -> float:
        total = self.world.all_reduce(torch.ones(1))
        {**SLIPS, **ENDING}[what](self.world, self.rank == odd)
        return float(total)


@pytest.mark.parametrize("what", SLIPS)
def test_a_slip_over_torch_is_never_answered(what: str) -> None:
    store = coordinator.host_store()
    with WorkerPool(Slipping, tp=3, worker_kwargs={"port": store.port}) as pool:
        assert pool.call("step", what, -1, timeout=PATIENCE_SECONDS) == 3.0
        with pytest.raises(CallDivergedError) as raised:
            pool.call("step", what, 0, timeout=PATIENCE_SECONDS)
        assert (raised.value.ranks, raised.value.did) == ((1, 0), NAMED[what])
        assert raised.value.rank == 0


def test_a_slip_that_ends_another_process_is_the_error() -> None:
    store = coordinator.host_store()
    given = {"port": store.port}
    with WorkerPool(Slipping, tp=3, worker_kwargs=given, restart="worker") as pool:
        for number in range(5):
            with pytest.raises(CallDivergedError) as raised:
                pool.call("step", "size", 0, timeout=PATIENCE_SECONDS)
            error = raised.value
            assert (error.number, error.method, error.group) == (number + 1, "step", "world")
            began = dict(zip(error.ranks, error.did, strict=True))
            assert began.pop(0) == "began all_reduce SUM float32[8]"
            assert [*began.values()] == ["began all_reduce SUM float32[4]"]
            assert isinstance(error.__cause__, WorkerLostError)
            assert error.__cause__.end == "killed by SIGABRT"


def test_a_slip_before_another_collective_is_the_error() -> None:
    store = coordinator.host_store()
    with (
        WorkerPool(Slipping, tp=2, worker_kwargs={"port": store.port}) as pool,
        pytest.raises(
            CallDivergedError, match=r"rank \d began broadcast .* rank \d began broadcast"
        ),
    ):
        pool.call("step", "size_before_another", 0, timeout=PATIENCE_SECONDS)


def test_a_death_that_is_no_slip_is_the_error() -> None:
    store = coordinator.host_store()
    with (
        WorkerPool(Slipping, tp=3, worker_kwargs={"port": store.port}) as pool,
        pytest.raises(WorkerLostError, match=r"rank 0 .*killed by SIGKILL"),
    ):
        pool.call("step", "death", 0, timeout=PATIENCE_SECONDS)


def slips(pool: WorkerPool) -> list[str]:
    """Rank 0 slips in a first call, and in one after others."""
    errors = []
    for n_before in (0, 3):
        for _ in range(n_before):
            assert pool.call("step", "dtype", -1, retry=True) == 4.0
        # With the worker's report late, the error is the abort, whose text is the divergence.
        with pytest.raises((CallDivergedError, WorkerError, GroupAbortedError)) as raised:
            pool.call("step", "dtype", 0, retry=False, timeout=PATIENCE_SECONDS)
        error = raised.value
        if isinstance(error, GroupAbortedError):
            assert error.failure.kind == DivergenceError.__name__
        else:
            assert isinstance(error, DivergenceError) or isinstance(
                error.__cause__, DivergenceError
            )
        errors.append(str(error))
    return errors


@pytest.mark.namespaces
def test_a_slip_over_hosts_is_never_answered(tmp_path: Path) -> None:
    options = {"worker": Slipping, "tp": 2, "pp": 2, "restart": "worker"}
    with two_hosts("IPv4") as hosts:
        errors, _ = run_ranks(2, over_hosts, str(tmp_path), hosts, slips, (), options)
    for error in errors:
        assert "all_reduce SUM int32[4]" in error
        assert "all_reduce SUM float32[4]" in error


class Uncompared(Slipping):
    """Its ranks do not compare what they call, over hosts either: its process ends first."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        compare_no_more()
        self.world.barrier()


def slip_of_the_other_host(pool: WorkerPool) -> str:
    with pytest.raises(CallDivergedError) as raised:
        pool.call("step", "size", 0, timeout=PATIENCE_SECONDS)
    return str(raised.value.__cause__)


@pytest.mark.namespaces
def test_a_slip_that_ends_a_process_of_another_host_is_the_error(tmp_path: Path) -> None:
    options = {"worker": Uncompared, "tp": 2}
    with two_hosts("IPv4") as hosts:
        ends = run_ranks(2, over_hosts, str(tmp_path), hosts, slip_of_the_other_host, (), options)
    assert "rank 1" in ends[0]
    assert "killed by SIGABRT on host" in ends[0]
