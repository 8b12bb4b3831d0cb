"""How reductions travel through NCCL, which knows few dtypes and no bitwise operations.

    int8 to int64 but int16, uint8, uint32, all floats   as they are
    int16, uint16                                        widened to int32
    bool                                                 as uint8; SUM, BOR as MAX, PRODUCT,
                                                         BAND as MIN
    complex, SUM and AVG                                 as pairs of reals

Bitwise operations on integers, BXOR of bools and a PRODUCT of complex numbers do not travel:
`nccl_wire` returns None. float16 and bfloat16 are added up by NCCL as it does, which for more
than two ranks may round after each addition; AVG is NCCL's own, which divides before it adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from device_comm.cuda.nccl_library import TYPES, Op
from device_comm.reduce_op import ReduceOp

_OPS = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.PRODUCT: Op.PROD,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.AVG: Op.AVG,
}
_BOOL_OPS = {
    ReduceOp.SUM: Op.MAX,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.BOR: Op.MAX,
    ReduceOp.PRODUCT: Op.MIN,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.BAND: Op.MIN,
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
BYTE = TYPES[torch.uint8]


@dataclass(frozen=True, slots=True)
class NcclWire:
    """One way for a reduction to travel.

    Attributes:
        op: what NCCL is asked for.
        dtype: the number of the dtype it computes with.
        width: how many of these an element of the tensor is.
        wider: what the tensor is converted to first; None: its memory is taken as it is.
    """

    op: Op
    dtype: int
    width: int = 1
    wider: torch.dtype | None = None


@cache
def nccl_wire(op: ReduceOp, dtype: torch.dtype) -> NcclWire | None:
    """The way for ``op`` on ``dtype``; None if it has to be gathered and reduced here."""
    if dtype is torch.bool:
        asked = _BOOL_OPS.get(op)
        return None if asked is None else NcclWire(asked, BYTE)
    asked = _OPS.get(op)
    if asked is None:
        return None
    if dtype.is_complex:
        return None if op is ReduceOp.PRODUCT else NcclWire(asked, TYPES[_REAL[dtype]], 2)
    wider = _WIDER.get(dtype)
    return NcclWire(asked, TYPES[wider or dtype], 1, wider)
