"""Members that issue different operations are told so, by all communicators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import coordinator
from coordinator import GroupCoordinator, ParallelGroups, ReduceOp
from shm_broadcast import CoordinatorError, DivergenceError, GroupAbortedError
from tests.coordinator.test_verbs import run_tables
from tests.device_comm.suite import check_table
from tests.patience import all_here, until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = (
    "verb",
    "dtype",
    "float8",
    "shape",
    "op",
    "root",
    "destination",
    "empty",
    "empty, later",
    "empty gathered",
    "empty among empty",
    "dim of all_gather",
    "dim of reduce_scatter",
    "dim of all_to_all",
    "dim of all_gatherv",
    "dim of reduce_scatterv",
    "dim of sizes",
    "columns",
)

if TYPE_CHECKING:
    from torch.distributed import Store


def join(rank: int, n: int, store: Store, torch_only: bool, **options: Any) -> ParallelGroups:
    return coordinator.init(
        tp=n,
        rank=rank,
        store=store,
        timeout=60,
        torch_only=torch_only,
        checked=torch_only,
        **options,
    )


def slips(tp: GroupCoordinator) -> dict[str, Any]:
    """What each rank calls, by what rank 1 does otherwise than the other two."""
    odd, x, n = tp.rank_in_group == 1, torch.ones(4), tp.world_size
    cube, none, two = torch.ones(n, n, n), torch.ones(0, 3), torch.ones(2, 3)
    dim, sizes = int(odd), [1] * n
    return {
        "verb": lambda: tp.all_gather(x) if odd else tp.all_reduce(x),
        "dtype": lambda: tp.all_reduce(x.double() if odd else x),
        "float8": lambda: [tp.broadcast(cube.to(FLOAT8[odd])), tp.barrier()],
        "shape": lambda: tp.all_reduce(x[:2] if odd else x),
        "op": lambda: tp.all_reduce(x, op=ReduceOp.MAX if odd else ReduceOp.SUM),
        "root": lambda: [tp.broadcast(x, int(odd)), tp.barrier()],
        "destination": lambda: [tp.reduce(x, (tp.rank_in_group + 1) % n), tp.barrier()],
        "empty": lambda: tp.all_reduce(none if odd else two),
        "empty, later": lambda: tp.all_gather(none if odd else two, 0, async_op=True).wait(),
        "empty gathered": lambda: tp.all_gatherv(none if odd else two, 0),
        "empty among empty": lambda: tp.all_reduce(none.T if odd else none),
        "dim of all_gather": lambda: tp.all_gather(cube, dim),
        "dim of reduce_scatter": lambda: tp.reduce_scatter(cube, dim),
        "dim of all_to_all": lambda: tp.all_to_all(cube, dim),
        "dim of all_gatherv": lambda: tp.all_gatherv(cube, dim),
        "dim of reduce_scatterv": lambda: tp.reduce_scatterv(cube, dim),
        "dim of sizes": lambda: tp.all_to_all(cube, dim, input_sizes=sizes, output_sizes=sizes),
        "columns": lambda: tp.all_gatherv(torch.ones(2, 6) if odd else torch.ones(3, 4), 0),
    }


def diverge(rank: int, n: int, store: Store, torch_only: bool, kind: str) -> str:
    with join(rank, n, store, torch_only, operation_timeout=60) as groups:
        tp = groups.tp
        assert tp.all_reduce(torch.ones(4)).tolist() == [n] * 4
        all_here(store, n)
        with pytest.raises((DivergenceError, GroupAbortedError)) as caught:
            slips(tp)[kind]()
        return str(caught.value)


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_members_that_diverge_are_told(kind: str, torch_only: bool) -> None:
    for text in run_ranks(3, diverge, SharedStore(), torch_only, kind, timeout=120):
        assert "issued" in text
        assert "where this rank issued" in text


def diverge_under_torchs_switch(rank: int, n: int, store: Store) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG says at torch's start
    with coordinator.init(tp=n, rank=rank, store=store, torch_only=True) as groups:
        x = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
        with pytest.raises((DivergenceError, GroupAbortedError)) as caught:
            groups.tp.all_reduce(x)
        return str(caught.value)


def test_torchs_switch_for_its_checks_is_that_of_ours() -> None:
    for text in run_ranks(2, diverge_under_torchs_switch, SharedStore()):
        assert "issued all_reduce SUM int32[4]" in text
        assert "all_reduce SUM float32[4]" in text


def checked_table(rank: int, n: int, store: Store) -> dict[str, str]:
    with join(rank, n, store, True) as groups:
        assert groups.tp.device_communicator.capabilities.detects_divergence
        return run_tables(groups.tp, [torch.float32, torch.int64])


def test_the_debug_mode_changes_no_result() -> None:
    check_table(run_ranks(2, checked_table, SharedStore(), timeout=180))


def wrong_on_all(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with join(rank, n, store, torch_only, operation_timeout=60) as groups:
        with pytest.raises(ValueError, match="not divisible"):
            groups.tp.reduce_scatter(torch.ones(3))
        assert groups.tp.all_reduce(torch.ones(1)).item() == n
        groups.tp.barrier()


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
def test_wrong_on_all_members_and_the_next_collective_is_right(torch_only: bool) -> None:
    run_ranks(2, wrong_on_all, SharedStore(), torch_only, timeout=120)


def wrong_on_one(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with join(rank, n, store, torch_only) as groups:
        groups.tp.barrier()
        if rank == 1:
            with pytest.raises(TypeError):
                groups.tp.all_reduce(torch.ones(2), op=ReduceOp.BAND)
            all_here(store, n)
            until(lambda: groups.board.aborted is not None)  # a wait on the board would raise it
            return
        all_here(store, n)
        start = time.monotonic()
        with pytest.raises(CoordinatorError, match="rank 1"):
            groups.tp.all_reduce(torch.ones(2), timeout=1)
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
def test_wrong_on_one_member_and_its_peers_name_it(torch_only: bool) -> None:
    run_ranks(2, wrong_on_one, SharedStore(), torch_only, timeout=120)
