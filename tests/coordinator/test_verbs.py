"""The table of verbs x dtypes x dims x ops x forms, over groups instead of communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator, ReduceOp
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]

if TYPE_CHECKING:
    from torch.distributed import Store


class AsCommunicator:
    """A group in the shape that the table asks for: its rank is the rank in the group."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.rank = group.rank_in_group
        self.capabilities = group.device_communicator.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def run_tables(group: GroupCoordinator, dtypes: list[torch.dtype]) -> dict[str, str]:
    comm: Any = AsCommunicator(group)
    return run_whole_table(comm, dtypes)


def table(rank: int, n: int, store: Store) -> dict[str, str]:
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        return run_tables(groups.tp, DTYPES)


def strided_table(rank: int, n: int, store: Store) -> dict[str, str]:
    """The pipeline groups of a 2 x 2 grid: [0, 2] and [1, 3]."""
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=30) as groups:
        assert groups.pp.ranks in ([0, 2], [1, 3])
        return run_tables(groups.pp, [torch.float32, torch.int64])


@pytest.mark.parametrize("n", [1, 3])
def test_table(n: int) -> None:
    check_table(run_ranks(n, table, SharedStore()))


def test_table_on_groups_that_do_not_start_at_rank_0() -> None:
    check_table(run_ranks(4, strided_table, SharedStore()))


def by_position(rank: int, n: int, store: Store) -> None:
    """``dim``, ``src``, ``dst`` and ``sizes`` may be given by position, as vLLM's users do."""
    with coordinator.init(tp=2, rank=rank, store=store, timeout=30) as groups:
        tp = groups.tp
        x = torch.arange(8.0).reshape(2, 4)
        assert tp.all_gather(x, 1).shape == (2, 8)
        assert tp.all_gather(x, 0).shape == (4, 4)
        assert tp.reduce_scatter(x, 1).tolist() == (2 * x.chunk(2, 1)[rank]).tolist()
        assert tp.all_gatherv(x[: rank + 1], 0, [1, 2]).shape == (3, 4)
        assert tp.reduce_scatterv(torch.arange(3.0), 0, [1, 2]).tolist() == ([0], [2, 4])[rank]
        out = torch.empty(rank + 1)
        assert tp.reduce_scatterv(torch.arange(3.0), 0, [1, 2], out=out) is out
        assert out.tolist() == ([0], [2, 4])[rank]
        largest: Any = {"op": ReduceOp.MAX, "async_op": True}
        work = tp.reduce_scatterv(torch.arange(3.0) + rank, 0, [1, 2], out=out, **largest)
        assert work.wait() is out
        assert out.tolist() == ([1], [2, 3])[rank]
        assert tp.broadcast(torch.tensor([rank]), 1).item() == 1
        gathered = tp.gather(torch.tensor([rank]), 1, 0)
        assert (gathered is None) if rank == 0 else gathered.tolist() == [0, 1]
        total = torch.tensor([rank + 1])
        assert tp.cpu_all_reduce_(total) is total
        assert total.item() == 3
        assert tp.cpu_all_reduce_(total, async_op=True).wait().item() == 6
        for wrong in (
            lambda: tp.broadcast(x, -1),
            lambda: tp.reduce_scatter(torch.ones(3), 0),
            lambda: tp.all_gather(x, 2),
        ):
            with pytest.raises(ValueError, match=r"src=-1|not divisible|dim 2"):
                wrong()
        tp.send(torch.tensor([rank]))
        assert tp.recv((1,), torch.int64).item() == 1 - rank
        tp.barrier()


def test_arguments_by_position() -> None:
    run_ranks(2, by_position, SharedStore())
