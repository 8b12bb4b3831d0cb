"""Layers whose parameters are cut over the ranks of a tensor-parallel group.

A column-parallel layer cuts its outputs and needs no communication; a row-parallel one cuts
its inputs and sums its outputs over the group: together, one all-reduce. Sizes that the group
does not divide are padded with zeros, which change no sum; or each rank has as many as it is told
to, as where attention heads must stay whole (`shares.HeadSplit`).

    heads = HeadSplit.over(queries=9, keys=3, ranks=2)   # rank 0: 6 and 2, rank 1: 3 and 1
    query = ColumnParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))   # 384, 192 outputs
    out = RowParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))
    y = out(attention(query(x)))                         # the same on all ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from coordinator.layout import Layout, Placement, Replicate, Shard

from . import prepacked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator import GroupCoordinator

    Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter as the checkpoint has it.

    Attributes:
        shape: of the whole tensor.
        layout: how it is cut over the group.
    """

    shape: tuple[int, ...]
    layout: Layout


class ShardedModule(nn.Module):
    """A module that declares whole parameters, and holds this rank's part of each.

    Parameters are on the ``meta`` device until real tensors are assigned to them.

    Args:
        group: the group that the parameters are cut over.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.whole: dict[str, WholeParameter] = {}

    def declare(self, name: str, shape: tuple[int, ...], placement: Placement) -> None:
        """Register parameter ``name``: a whole of ``shape``, cut by ``placement``."""
        whole = WholeParameter(shape, Layout((placement,)))
        local = torch.empty(whole.layout.local_shape(shape, [self.group]), device="meta")
        self.whole[name] = whole
        self.register_parameter(name, nn.Parameter(local, requires_grad=False))


class ShardedLinear(ShardedModule):
    """``x @ weight.T + bias``, of which this rank has a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def declare_bias(self, outputs: int, placement: Placement | None) -> None:
        """Register the bias, cut by ``placement``; ``None``: there is none."""
        if placement is None:
            self.register_parameter("bias", None)
        else:
            self.declare("bias", (outputs,), placement)

    def prepack(self) -> None:
        """Lay the weight out as this device computes best; no other use of it is possible then."""
        if prepacked.can_prepack(self.weight):
            self.weight = nn.Parameter(prepacked.prepack(self.weight), requires_grad=False)

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """``activation(x @ weight.T + bias)``, of this rank's part of the weight; a new tensor."""
        if self.weight.is_mkldnn:
            return prepacked.linear(x, self.weight, bias, activation)
        y = functional.linear(x, self.weight, bias)
        return y if activation is None else activation(y)


class ColumnParallelLinear(ShardedLinear):
    """``x @ weight.T + bias`` with the outputs cut: [rows, inputs] → [rows, ceil(outputs / tp)].

    Collective: no.

    Args:
        activation: a function of each output.
        bias: whether there is one.
        sizes: how many outputs each rank has, without padding; ``None``: all as many.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: GroupCoordinator,
        activation: Activation | None = None,
        *,
        bias: bool = True,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(group)
        self.activation = activation
        placement = Shard(0, padded=sizes is None, sizes=sizes)
        self.declare("weight", (outputs, inputs), placement)
        self.declare_bias(outputs, placement if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        return self.product(x, self.bias, self.activation)


class MergedColumnParallelLinear(ShardedLinear):
    """Column-parallel products of the same rows, computed as one: their outputs side by side.

    Collective: no.

    Args:
        parts: those products, whose parameters are there; all have a bias, or none.
    """

    def __init__(self, parts: Sequence[ColumnParallelLinear]) -> None:
        super().__init__(parts[0].group)
        weight = torch.cat([part.weight for part in parts])
        self.weight = nn.Parameter(weight, requires_grad=False)
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs of each part."""
        return self.product(x, self.bias)


class RowParallelLinear(ShardedLinear):
    """``x @ weight.T + bias`` with the inputs cut: [rows, ceil(inputs / tp)] → [rows, outputs].

    The bias is added once, to the sum. Collective: yes, every member of the group.

    Args:
        bias: whether there is one.
        sizes: how many inputs each rank has, without padding; ``None``: all as many.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: GroupCoordinator,
        *,
        bias: bool = True,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(group)
        self.declare("weight", (outputs, inputs), Shard(1, padded=sizes is None, sizes=sizes))
        self.declare_bias(outputs, Replicate() if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs, the same on every rank."""
        total: torch.Tensor = self.group.all_reduce_(self.product(x, None))
        return total if self.bias is None else total.add_(self.bias)


class VocabParallelEmbedding(ShardedModule):
    """Rows of a table that is cut by rows: int64 [...] → [..., size].

    Collective: yes, every member of the group.
    """

    weight: nn.Parameter

    def __init__(self, rows: int, size: int, group: GroupCoordinator) -> None:
        super().__init__(group)
        self.declare("weight", (rows, size), Shard(0, padded=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ``ids``, the same on every rank."""
        rows = self.weight.shape[0]
        local = ids - rows * self.group.rank_in_group
        elsewhere = (local < 0) | (local >= rows)
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce_(found.masked_fill_(elsewhere.unsqueeze(-1), 0))


def regroup(model: nn.Module, group: GroupCoordinator) -> None:
    """Have all layers of ``model`` go on in another group, in which this rank has the same place.

    Collective: no.
    """
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.group = group
