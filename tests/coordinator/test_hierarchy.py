"""A group seen as its nodes; on one machine, nodes are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import coordinator
import coordinator.groups
from coordinator import ParallelGroups, ReduceOp
from coordinator.hosts import HostTopology, find_nodes
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


def init_on_nodes(rank: int, n: int, store: Store, node_of: tuple[int, ...]) -> ParallelGroups:
    """All ranks share a board, and are told that they are on nodes."""
    found = find_nodes

    def pretended(*arguments: object) -> HostTopology:
        real = found(*arguments)
        return replace(real, node_of=node_of)

    coordinator.groups.find_nodes = pretended  # type: ignore[attr-defined]
    return coordinator.init(tp=n, rank=rank, store=store, timeout=30, operation_timeout=20)


def two_and_two(rank: int, n: int, store: Store) -> None:
    with init_on_nodes(rank, n, store, (0, 0, 2, 2)) as groups:
        world, intra, inter = (
            groups.world.hierarchy.world,
            groups.world.hierarchy.intra,
            groups.world.hierarchy.inter,
        )
        assert world is groups.world
        assert intra.ranks == ([0, 1] if rank < 2 else [2, 3])
        assert (inter.ranks if inter else None) == ([0, 2] if rank in (0, 2) else None)
        x = torch.tensor([rank + 1, 3 * rank + 2])
        before = x.clone()
        for op, expected in {
            ReduceOp.SUM: [10, 26],
            ReduceOp.PRODUCT: [24, 880],
            ReduceOp.MIN: [1, 2],
            ReduceOp.MAX: [4, 11],
            ReduceOp.BOR: [7, 15],
            ReduceOp.BXOR: [4, 4],
        }.items():
            assert world.all_reduce(x, op=op, hierarchical=True).tolist() == expected
        out = torch.empty(2)
        assert world.all_reduce(x.float(), op=ReduceOp.AVG, hierarchical=True, out=out) is out
        assert out.tolist() == [2.5, 6.5]
        leaf = torch.zeros(2, requires_grad=True)
        assert world.all_reduce(x.float(), hierarchical=True, out=leaf) is leaf
        assert leaf.tolist() == [10.0, 26.0]
        for dtype in (torch.float16, torch.bfloat16):
            large = torch.tensor([40000.0, 1.0], dtype=dtype)
            average = world.all_reduce(large, op=ReduceOp.AVG, hierarchical=True)
            assert average.dtype == dtype
            assert torch.equal(average, large)
        with pytest.raises(TypeError, match="out is"):
            world.all_reduce(x, hierarchical=True, out=torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ValueError, match="out has shape"):
            world.all_reduce(x, hierarchical=True, out=torch.zeros(3, 2, dtype=torch.int64))
        work = world.all_reduce(x, hierarchical=True, async_op=True)
        assert work.wait().tolist() == [10, 26]
        assert torch.equal(x, before)
        messy = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        results = world.all_gather_object(world.all_reduce(messy, hierarchical=True).tolist())
        assert all(result == results[0] for result in results)
        with pytest.raises(TypeError):
            world.all_reduce(x, op=ReduceOp.AVG, hierarchical=True)
        world.barrier()


def three_and_one(rank: int, n: int, store: Store) -> None:
    with init_on_nodes(rank, n, store, (0, 0, 0, 3)) as groups:
        value = torch.tensor([1.0, 2.0, 3.0, 10.0][rank])
        average = groups.world.all_reduce(value, op=ReduceOp.AVG, hierarchical=True)
        assert average.item() == 4
        assert groups.tp.hierarchy.intra.world_size == (1 if rank == 3 else 3)
        groups.world.barrier()


def one_each(rank: int, n: int, store: Store) -> None:
    with init_on_nodes(rank, n, store, (0, 1)) as groups:
        assert groups.world.hierarchy.inter is groups.world
        assert groups.world.hierarchy.intra.ranks == [rank]
        assert groups.world.all_reduce(torch.ones(2), hierarchical=True).tolist() == [2, 2]
        groups.world.barrier()


def one_node(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        hierarchy = groups.tp.hierarchy
        assert hierarchy.intra is groups.tp
        assert (hierarchy.inter.ranks if hierarchy.inter else None) == ([0] if rank == 0 else None)
        average = groups.tp.all_reduce(
            torch.tensor([float(rank)]), op=ReduceOp.AVG, hierarchical=True
        )
        assert average.item() == 0.5
        # a communicator knows of no nodes: to it, all ranks are on one
        comm, x = groups.tp.device_communicator, torch.ones(3)
        assert comm.all_reduce(x, hierarchical=True).tolist() == [2, 2, 2]
        work = comm.all_reduce(x, hierarchical=True, async_op=True, timeout=30.0)
        assert work.wait().tolist() == [2, 2, 2]
        # and the arguments that vLLM's users give by position are taken from communicators, too
        assert comm.all_gather(x, 0).tolist() == groups.tp.all_gather(x, 0).tolist()
        groups.world.barrier()


def test_two_nodes_of_two() -> None:
    """Nodes {0, 1}, {2, 3}: intra [0, 1] and [2, 3], inter [0, 2]; 1 and 3 have no inter."""
    run_ranks(4, two_and_two, SharedStore())


def test_bagua_averages_twice_on_unequal_nodes() -> None:
    """{1, 2, 3}, {10}: the average is 4, not 6."""
    run_ranks(4, three_and_one, SharedStore())


@pytest.mark.parametrize("body", [one_each, one_node])
def test_other_shapes(body: object) -> None:
    run_ranks(2, body, SharedStore())


def test_alone() -> None:
    with coordinator.init(rank=0) as groups:
        x = torch.ones(1)
        assert groups.world.all_reduce(x, hierarchical=True) is x
        assert groups.world.hierarchy.inter is groups.world
