"""Collectives inside `torch.compile`: no graph break, right results."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import coordinator
from coordinator import GroupCoordinator, ReduceOp, compile_ops
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


class Layer(nn.Module):
    """All verbs that a graph keeps, with what stands between them in a tensor-parallel layer."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed, kept = self.group.all_reduce_norm(self.linear(x), x, x[0])
        total = self.group.all_reduce(normed + kept).relu()
        gathered = self.group.all_gather(total * 2, dim=-1)
        scattered = self.group.reduce_scatter(gathered.t() + 1, dim=0)
        largest = self.group.all_reduce_(scattered.clone(), op=ReduceOp.MAX)
        return gathered, scattered, largest


def no_gradient(group: GroupCoordinator) -> None:
    """Compiled or not, autograd sees nothing of a verb; a wrong dim is refused alike."""
    linear = nn.Linear(2, 2)
    for verb in (group.all_reduce, group.all_gather, group.reduce_scatter):

        def layer(x: Tensor, verb: Any = verb) -> Tensor:
            found: Tensor = verb(linear(x))
            return found * 2

        x = torch.ones(2, 2)
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert not found.requires_grad
        assert torch.equal(found, layer(x))
    for verb in (group.all_gather, group.reduce_scatter):
        for wrong in (lambda x, verb=verb: verb(x, dim=5), lambda x, verb=verb: verb(x.sum(), 0)):
            for call in (wrong, torch.compile(wrong, backend="aot_eager")):
                with pytest.raises(ValueError, match="is out of range for a tensor of"):
                    call(torch.ones(2, 2))
            torch._dynamo.reset()


def in_place(rank: int, group: GroupCoordinator) -> None:
    """Compiled or not, ``x`` is changed itself, in a view too, and autograd does not notice."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        same = group.all_reduce_(y)
        return same + y

    def column(x: Tensor) -> Tensor:
        return group.all_reduce_(x[:, 1], op=ReduceOp.MAX)

    call: Any
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        weight = torch.tensor([2.0], requires_grad=True)
        y = call(torch.tensor([3.0 + rank]), weight)
        y.sum().backward()
        assert y.tolist() == [28.0]  # 2 · (2·3 + 2·4)
        assert weight.grad is not None
        assert weight.grad.tolist() == [2 * (3.0 + rank)]
    for call in (column, torch.compile(column, fullgraph=True, backend="aot_eager")):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
        assert call(x).tolist() == [12, 14]
        assert x.tolist() == [[1 + 10 * rank, 12], [3 + 10 * rank, 14]]


def compiled(rank: int, n: int, store: Store) -> None:
    torch.manual_seed(0)
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups, torch.no_grad():
        layer = Layer(groups.tp)
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for rows in (3, 3, 5):
            x = torch.randn(rows, 4) + rank
            expected = layer(x)
            for ours, theirs in zip(fast(x), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        explained: Any = torch._dynamo.explain(layer)(torch.randn(3, 4))
        assert explained.graph_break_count == 0
        calls = [node.target for node in explained.graphs[0].graph.nodes]
        assert sum("group_coordinator" in str(call) for call in calls) == 5
        name = groups.tp.unique_name
        for op, arguments in (
            (compile_ops.all_reduce, (torch.randn(3, 4).t(), 0, name)),
            (compile_ops.all_reduce_norm, (*torch.randn(3, 4, 3).mT[:2], torch.ones(4), 0.1, name)),
            (compile_ops.all_gather, (torch.randn(3, 4), -1, n, name)),
            (compile_ops.all_gather, (torch.randn(3, 4), 0, n, name)),
            (compile_ops.reduce_scatter, (torch.randn(4, 2 * n), 1, 0, n, name)),
            (compile_ops.reduce_scatter, (torch.randn(n, 3), -2, 2, n, name)),
        ):
            torch.library.opcheck(op, arguments)
        with torch.enable_grad():
            no_gradient(groups.tp)
            in_place(rank, groups.tp)
        groups.tp.barrier()


def test_no_graph_break_and_opcheck() -> None:
    run_ranks(2, compiled, SharedStore(), timeout=100)


def experts(rank: int, n: int, store: Store) -> None:
    """Numbers of rows that change, which torch compiles as symbols: rank r has rows of r + 1."""
    warnings.simplefilter("ignore")  # torch's, of calls that it does not look into
    with coordinator.init(dp=n, rank=rank, store=store, timeout=30) as groups, torch.no_grad():

        def layer(x: Tensor) -> Tensor:
            return groups.ep.dispatch(x * 2)[0] + 1

        fast = torch.compile(layer, backend="aot_eager")
        for count in (3, 5):
            x = torch.full((count + rank, 2), rank + 1.0)
            assert fast(x).tolist() == [[3, 3]] * count + [[5, 5]] * (count + 1)
        groups.world.barrier()


def test_rows_that_go_to_experts_may_change_in_number() -> None:
    run_ranks(2, experts, SharedStore(), timeout=200)


def test_a_group_of_one_leaves_no_op_behind() -> None:
    with coordinator.init(rank=0) as groups:
        for verb in (groups.tp.all_reduce, groups.tp.all_reduce_):
            seen = torch._dynamo.explain(lambda x, verb=verb: verb(x) + 1)(torch.ones(2))
            assert seen.graph_break_count == 0
            nodes = seen.graphs[0].graph.nodes
            assert not [node for node in nodes if "group_coordinator" in str(node.target)]
            assert not [node for node in nodes if "copy_" in str(node.target)]


def test_groups_are_found_while_they_are_open() -> None:
    with coordinator.init(rank=0) as first, coordinator.init(rank=0) as second:
        assert (first.tp.unique_name, second.tp.unique_name) == ("tp:0", "tp:1")
        assert compile_ops.find("tp:1") is second.tp.device_communicator
    with pytest.raises(ValueError, match="no group 'tp:0' in this process"):
        compile_ops.find("tp:0")
