"""How tensors travel through torch process groups, which know few dtypes.

What is only moved travels as it is if gloo knows the dtype, else as bytes. What is reduced
in transit travels as a dtype and an operation that gloo and NCCL both know:

    float32, float64, uint8, int8, int32, int64      as they are
    float16, bfloat16                                widened to float32
    int16, uint16                                    widened to int32
    uint32                                           widened to int64
    bool                                             as uint8; SUM as MAX, PRODUCT as MIN
    complex, SUM and AVG                             as pairs of reals
    AVG                                              as SUM, divided on arrival

A PRODUCT of complex numbers does not travel this way, nor does a MIN or MAX of floats, of which
gloo loses NaN where it is the second operand: `reduction_wire` returns None.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from device_comm.reduce_op import ReduceOp

_KNOWN = frozenset(
    {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_BOOL_OP = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8, of one dimension."""
    return _flat(x).view(torch.uint8)


def as_cargo(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a dtype that travels, of one dimension."""
    flat = _flat(x)
    return flat if x.dtype in _KNOWN else flat.view(torch.uint8)


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor in one dimension. One element may have any stride, also in a view."""
    return x.as_strided((x.numel(),), (1,))


@dataclass(frozen=True)
class ReductionWire:
    """One way for a reduction to travel.

    Attributes:
        op: the operation that torch is asked for.
        wider: what the tensor is converted to; None: its memory is looked at differently.
        average: divide by the number of ranks on arrival.
    """

    op: ReduceOp
    wider: torch.dtype | None
    average: bool

    def wrap(self, x: Tensor) -> Tensor:
        """What travels for ``x``: its own memory, or a new tensor that is not filled yet."""
        if self.wider is not None:
            return torch.empty(x.shape, dtype=self.wider, device=x.device)
        if x.dtype is torch.bool:
            return x.view(torch.uint8)
        return torch.view_as_real(x) if x.is_complex() else x

    def load(self, wire: Tensor, source: Tensor) -> None:
        """Fill what `wrap` returned with ``source``, unless it is ``source``'s memory."""
        if self.wider is not None:
            wire.copy_(source)
        elif wire.data_ptr() != source.data_ptr():
            wire.copy_(self.wrap(source))

    def unload(self, wire: Tensor, output: Tensor, world_size: int) -> None:
        """Turn the reduced ``wire`` into the result; ``output`` is what was wrapped."""
        if self.average:
            wire.div_(world_size)
        if self.wider is not None:
            output.copy_(wire)


@cache
def reduction_wire(op: ReduceOp, dtype: torch.dtype) -> ReductionWire | None:
    """The way for ``op`` on ``dtype``; None if it has to be gathered and reduced here."""
    if op is ReduceOp.PRODUCT and dtype.is_complex:
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point:
        return None
    average = op is ReduceOp.AVG
    asked = ReduceOp.SUM if average else op
    if dtype is torch.bool:
        asked = _BOOL_OP.get(asked, asked)
    return ReductionWire(asked, _WIDER.get(dtype), average)
