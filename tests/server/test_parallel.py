"""Parallel layers, without a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from server.workers.parallel import ColumnParallelLinear, RowParallelLinear, regroup
from tests.server.fake_groups import alone


def test_layers_go_on_in_another_group() -> None:
    before: Any = alone().tp
    after: Any = alone().tp
    column, row = ColumnParallelLinear(4, 6, before), RowParallelLinear(6, 4, before)
    weights = [column.weight, row.weight]
    regroup(nn.Sequential(column, nn.ModuleList([nn.LayerNorm(6), row])), after)
    assert [column.group, row.group] == [after, after]
    assert [column.weight, row.weight] == weights
