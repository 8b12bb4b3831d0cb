"""Shard the layers of a model over a tensor-parallel group, and connect pipeline stages.

A column-parallel layer shards its outputs, without communication; a row-parallel layer shards its
inputs and sums its outputs over the group. Together they need one all-reduce. Sizes that the group
does not divide are padded with zeros, which change no sum; ``sizes`` gives each rank its own size,
where attention heads must stay whole (`model_folder.HeadSplit`).

    heads = HeadSplit.over(queries=9, keys=3, ranks=2)   # rank 0: 6 and 2, rank 1: 3 and 1
    query = ColumnParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))   # 384, 192 outputs
    out = RowParallelLinear(576, 576, tp, sizes=heads.query_sizes(64))
    y = out(attention(query(x)))                         # equal on all ranks

On the CPU, float32 products use prepacked weights: torch's own product repacks the weight in every
call, which takes longer than the product of a short text. oneDNN keeps 0.6 MiB of kernels per
number of rows, so rows are computed in blocks, and the last block is padded to one of a few sizes.
The same goes for oneDNN's functions such as gelu, whose kernels fragment the heap (600 batches of
different sizes left 0.5 GiB unusable).
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

    Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_BLOCK = 128
"""Rows computed at once; fewer use the caches badly, more need more memory for kernels."""
_COARSE, _FINE = 32, 8
"""A block is padded to a multiple of `_FINE` rows, above ``2 * _COARSE`` rows of `_COARSE`."""
_FUSED: dict[object, tuple[str, str]] = {None: ("none", ""), functional.gelu: ("gelu", "none")}
"""oneDNN's names of activations that it fuses into the product."""


def can_prepack(weight: torch.Tensor) -> bool:
    """Return whether `prepack` supports a weight."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def prepack(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 weight [outputs, inputs] in the opaque layout of `linear`; same size."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return ``activation(x @ weight.T + bias)``: float32 [rows, inputs] → new [rows, outputs].

    Args:
        x: on the CPU.
        weight: prepacked.
        bias: [outputs].
        activation: elementwise function.
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


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """Shape of a parameter in the checkpoint, and its sharding over the group."""

    shape: tuple[int, ...]
    layout: Layout


class ShardedModule(nn.Module):
    """Module that declares whole parameters, and holds this rank's part of each.

    Parameters are on the ``meta`` device until tensors are loaded.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.whole: dict[str, WholeParameter] = {}

    def declare(self, name: str, shape: tuple[int, ...], placement: Placement) -> None:
        """Register parameter ``name``: a whole tensor of ``shape``, sharded by ``placement``."""
        whole = WholeParameter(shape, Layout((placement,)))
        local = torch.empty(whole.layout.local_shape(shape, [self.group]), device="meta")
        self.whole[name] = whole
        self.register_parameter(name, nn.Parameter(local, requires_grad=False))


class ShardedLinear(ShardedModule):
    """``x @ weight.T + bias`` with this rank's part of the weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def declare_bias(self, outputs: int, placement: Placement | None) -> None:
        """Register the bias, sharded by ``placement``; ``None``: no bias."""
        if placement is None:
            self.register_parameter("bias", None)
        else:
            self.declare("bias", (outputs,), placement)

    def prepack(self) -> None:
        """Convert the weight to the device's fastest layout, which only `product` can use."""
        if can_prepack(self.weight):
            self.weight = nn.Parameter(prepack(self.weight), requires_grad=False)

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Return ``activation(x @ weight.T + bias)`` of this rank's weight, as a new tensor."""
        if self.weight.is_mkldnn:
            return linear(x, self.weight, bias, activation)
        y = functional.linear(x, self.weight, bias)
        return y if activation is None else activation(y)


class ColumnParallelLinear(ShardedLinear):
    """``x @ weight.T + bias``, outputs sharded: [rows, inputs] → [rows, ceil(outputs / tp)].

    Args:
        activation: elementwise function of the outputs.
        sizes: outputs of each rank, without padding; ``None``: equal sizes.
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
        """Return this rank's outputs."""
        return self.product(x, self.bias, self.activation)


class MergedColumnParallelLinear(ShardedLinear):
    """Column-parallel layers of the same input, computed as one product; outputs concatenated.

    Args:
        parts: loaded layers; all with a bias, or none.
    """

    def __init__(self, parts: Sequence[ColumnParallelLinear]) -> None:
        super().__init__(parts[0].group)
        weight = torch.cat([part.weight for part in parts])
        self.weight = nn.Parameter(weight, requires_grad=False)
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs of each part."""
        return self.product(x, self.bias)


class RowParallelLinear(ShardedLinear):
    """``x @ weight.T + bias``, inputs sharded: [rows, ceil(inputs / tp)] → [rows, outputs].

    The bias is added once, to the sum. Collective: yes, every member of the group.

    Args:
        sizes: inputs of each rank, without padding; ``None``: equal sizes.
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
        """Return all outputs, equal on all ranks."""
        total: torch.Tensor = self.group.all_reduce_(self.product(x, None))
        return total if self.bias is None else total.add_(self.bias)


class VocabParallelEmbedding(ShardedModule):
    """Rows of a table that is sharded by rows: int64 [...] → [..., size].

    Collective: yes, every member of the group.
    """

    weight: nn.Parameter

    def __init__(self, rows: int, size: int, group: GroupCoordinator) -> None:
        super().__init__(group)
        self.declare("weight", (rows, size), Shard(0, padded=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, equal on all ranks."""
        rows = self.weight.shape[0]
        local = ids - rows * self.group.rank_in_group
        elsewhere = (local < 0) | (local >= rows)
        vectors = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce_(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0))


def regroup(model: nn.Module, group: GroupCoordinator) -> None:
    """Move all layers of ``model`` to another group, with unchanged ranks."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.group = group


def whole_parameters(model: nn.Module) -> dict[str, WholeParameter]:
    """Return every parameter of ``model`` as in the checkpoint, by its name in ``model``.

    Parameters outside a `ShardedModule` are replicated.
    """
    parameters: dict[str, WholeParameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, ShardedModule):
                parameters[full] = module.whole[name]
            else:
                parameters[full] = WholeParameter(tuple(parameter.shape), Layout())
    return parameters


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
    """Read this rank's part of a stage's parameters.

    Args:
        path: checkpoint.
        whole: parameters of the stage, from `whole_parameters`.
        names: name in the checkpoint of each parameter.
        tp: group over which they are sharded.
        device, dtype: of the results.
        report: called with ``(done, total, what)`` during the read.

    Raises:
        CheckpointError: the checkpoint does not have these parameters.
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
    """Return the checkpoint's name of a stage's parameter.

    Args:
        name: name in the stage: ``"layers.3.query.weight"``.
        layers: the checkpoint's name of the layers: ``"encoder.layer"``.
        modules: the checkpoint's names of modules: ``"query"`` gives ``"attention.self.query"``.
    """
    module, _, parameter = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".")
        return f"{layers}.{index}.{modules[part]}.{parameter}"
    return f"{modules[module]}.{parameter}"


def send_activations(groups: ParallelGroups, hidden: torch.Tensor) -> None:
    """Send this stage's result to the next. Collective: yes, every rank of the stage."""
    groups.pp.send_tensor_dict({"hidden": hidden}, all_gather_group=groups.tp)


def recv_activations(groups: ParallelGroups) -> torch.Tensor:
    """Receive the result of the previous stage. Collective: yes, every rank of this stage."""
    hidden: torch.Tensor = groups.pp.recv_tensor_dict(all_gather_group=groups.tp)["hidden"]
    return hidden


def compute_with(threads: int | None, dtype: str) -> torch.dtype:
    """Set torch's threads, and attention for any length; return the dtype.

    Raises:
        ValueError: ``threads`` is less than 1, or ``dtype`` is not in `TOLERANCES`.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(TOLERANCES)}; got {dtype!r}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more; got {threads}")
        torch.set_num_threads(threads)
    # cuDNN plans each new sequence length: 2.4 ms in every layer.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return torch_dtype
