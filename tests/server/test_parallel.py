"""Parallel layers, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

import coordinator
from server.workers.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    regroup,
)
from tests.ranks import run_ranks
from tests.server.fake_groups import alone
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store

TABLE, UP, DOWN = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(5))
"""Whole weights: 6 rows of 4; 4 inputs to 6 outputs, transposed; and back."""


def compiled(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups, torch.no_grad():
        table = VocabParallelEmbedding(6, 4, groups.tp)
        up = ColumnParallelLinear(4, 6, groups.tp, bias=False)
        down = RowParallelLinear(6, 4, groups.tp, bias=False)
        table.weight = nn.Parameter(TABLE.chunk(n)[rank])
        up.weight = nn.Parameter(UP.chunk(n)[rank])
        down.weight = nn.Parameter(DOWN.t().chunk(n, dim=1)[rank])
        model = nn.Sequential(table, up, nn.ReLU(), down)
        fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        for tokens in (3, 5):
            ids = torch.arange(tokens)
            expected = functional.relu(TABLE[ids] @ UP.t()) @ DOWN
            torch.testing.assert_close(fast(ids), expected)
            torch.testing.assert_close(model(ids), expected)


def test_layers_are_compiled_without_a_break_of_the_graph() -> None:
    run_ranks(2, compiled, SharedStore(), timeout=100)


def test_layers_go_on_in_another_group() -> None:
    before: Any = alone().tp
    after: Any = alone().tp
    column, row = ColumnParallelLinear(4, 6, before), RowParallelLinear(6, 4, before)
    weights = [column.weight, row.weight]
    regroup(nn.Sequential(column, nn.ModuleList([nn.LayerNorm(6), row])), after)
    assert [column.group, row.group] == [after, after]
    assert [column.weight, row.weight] == weights
