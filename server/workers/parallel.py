"""Layers of models whose parameters are cut over the ranks of a tensor-parallel group, and their
stages.

torch's own float32 product repacks the weight in every call: for the few rows of one text that
takes longer than the product itself.

oneDNN keeps kernels, 0.6 MiB of them, for each number of rows that it has met. So rows are computed
in blocks, and the last block is padded to one of a few sizes. The same goes for oneDNN's own
functions, such as gelu. Their kernels are small, but fragment the heap between the tensors of
batches: 600 batches of different sizes left 0.5 GiB that later batches could not use.

A column-parallel layer cuts its outputs and needs no communication; a row-parallel one cuts
its inputs and sums its outputs over the group: together, one all-reduce. Sizes that the group
does not divide are padded with zeros, which change no sum; or each rank has as many as it is told
to, as where attention heads must stay whole (`model_folder.HeadSplit`).

    heads = HeadSplit.over(queries=9, keys=3, ranks=2)   # rank 0: 6 and 2, rank 1: 3 and 1
    query = ColumnParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))   # 384, 192 outputs
    out = RowParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))
    y = out(attention(query(x)))                         # the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from coordinator import GroupCoordinator
from coordinator.layout import Layout, Placement, Replicate, Shard, load_sharded

from ..config import TOLERANCES

if TYPE_CHECKING:
    from coordinator import ParallelGroups


_BLOCK = 128
"""Rows computed at once; fewer make poor use of the caches, more need more memory for kernels."""
_COARSE, _FINE = 32, 8
"""A block is filled up to a multiple of these rows: of `_COARSE` beyond ``2 * _COARSE`` rows."""
_FUSED: dict[object, tuple[str, str]] = {None: ("none", ""), functional.gelu: ("gelu", "none")}
"""What oneDNN computes along with a product, which saves a pass over the memory: its names."""


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether `linear` takes such a weight once it is prepacked."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def prepack(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight [outputs, inputs] as `linear` takes it: opaque, and of the same size."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)``: float32 [rows, inputs] → a new [rows, outputs].

    Args:
        x: on the CPU.
        weight: prepacked.
        bias: [outputs].
        activation: a function of each element.
    """
    blocks = [_block(each, weight, bias, activation) for each in torch.split(x, _BLOCK)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    rows = len(x)
    missing = -rows % (_FINE if rows <= 2 * _COARSE else _COARSE)
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    name, algorithm = _FUSED.get(activation, _FUSED[None])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], algorithm)
    if activation is not None and activation not in _FUSED:
        y = activation(y)
    return y[:rows]


if TYPE_CHECKING:
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
        if can_prepack(self.weight):
            self.weight = nn.Parameter(prepack(self.weight), requires_grad=False)

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """``activation(x @ weight.T + bias)``, of this rank's part of the weight; a new tensor."""
        if self.weight.is_mkldnn:
            return linear(x, self.weight, bias, activation)
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


def whole_parameters(model: nn.Module) -> dict[str, WholeParameter]:
    """Every parameter of ``model`` as the checkpoint has it, by its name in ``model``.

    Parameters of modules that are not `ShardedModule` are replicated.
    """
    found: dict[str, WholeParameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, ShardedModule):
                found[full] = module.whole[name]
            else:
                found[full] = WholeParameter(tuple(parameter.shape), Layout())
    return found


def read_parameters(
    path: Path,
    whole: Mapping[str, WholeParameter],
    names: Mapping[str, str],
    tp: GroupCoordinator,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[int, int, str], None],
) -> dict[str, torch.Tensor]:
    """Read this rank's part of a stage's parameters, as ``dtype``.

    Args:
        path: the checkpoint.
        whole: the stage's parameters, of `whole_parameters`.
        names: what the checkpoint calls them.
        tp: the group that they are cut over.
        device: where they shall lie.
        dtype: what they shall be.
        report: called with ``(done, total, what)`` meanwhile.

    Raises:
        CheckpointError: the weights are not those of this stage.

    Collective: no.
    """
    return load_sharded(
        path,
        {name: parameter.layout for name, parameter in whole.items()},
        tp,
        source=names.__getitem__,
        shapes={name: parameter.shape for name, parameter in whole.items()},
        dtype=dtype,
        device=device,
        report=report,
    )


def checkpoint_name(name: str, layers: str, modules: Mapping[str, str]) -> str:
    """The checkpoint's name of a stage's parameter.

    Args:
        name: the stage's name of it: ``"layers.3.query.weight"``.
        layers: what the checkpoint calls its layers: ``"encoder.layer"``.
        modules: what it calls the modules: ``"query"`` gives ``"attention.self.query"``.
    """
    module, _, parameter = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".")
        return f"{layers}.{index}.{modules[part]}.{parameter}"
    return f"{modules[module]}.{parameter}"


def send_activations(groups: ParallelGroups, hidden: torch.Tensor) -> None:
    """Send what this stage has computed to the next. Collective: yes, every rank of the stage."""
    groups.pp.send_tensor_dict({"hidden": hidden}, all_gather_group=groups.tp)


def recv_activations(groups: ParallelGroups) -> torch.Tensor:
    """What the stage before has sent. Collective: yes, every rank of this stage."""
    hidden: torch.Tensor = groups.pp.recv_tensor_dict(all_gather_group=groups.tp)["hidden"]
    return hidden


def compute_with(threads: int | None, dtype: str) -> torch.dtype:
    """Have torch use ``threads`` in this process, if they are given, and attention that takes any
    length at once; return the dtype.

    Raises:
        ValueError: ``threads`` is less than 1, or ``dtype`` none of `TOLERANCES`.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(TOLERANCES)}; got {dtype!r}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more; got {threads}")
        torch.set_num_threads(threads)
    # cuDNN makes a plan for each new length of a sequence: 2.4 ms in every layer.
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: torch.dtype = getattr(torch, dtype)
    return found
