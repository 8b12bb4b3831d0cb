"""How reductions are expressed in NCCL, which has few dtypes and no bitwise operations.

    int8, int32, int64, uint8, uint32                    as they are
    floats, SUM, PRODUCT and AVG                         as they are
    int16, uint16                                        widened to int32
    bool                                                 as uint8; SUM, BOR as MAX, PRODUCT,
                                                         BAND as MIN
    complex, SUM and AVG                                 as pairs of reals

NCCL cannot do bitwise operations on integers, BXOR of bools, and PRODUCT of complex numbers, and
loses NaN in MIN and MAX of floats: `nccl_wire` returns None for them. Sums of float16 and bfloat16
over more than two ranks may be rounded by NCCL after each addition. AVG is NCCL's own, which
divides before it adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from device_comm.cuda.nccl.library import TYPES, Op
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
    """A reduction as NCCL does it.

    Attributes:
        op: NCCL's reduction.
        dtype: NCCL's number of the dtype to compute with.
        width: how many values of that dtype an element of the tensor has.
        wider: the dtype to convert the tensor to first; None: its memory is used as it is.
    """

    op: Op
    dtype: int
    width: int = 1
    wider: torch.dtype | None = None


@cache
def nccl_wire(op: ReduceOp, dtype: torch.dtype) -> NcclWire | None:
    """How NCCL does ``op`` on ``dtype``; None if it cannot: gather, and reduce with torch."""
    if dtype is torch.bool:
        asked = _BOOL_OPS.get(op)
        return None if asked is None else NcclWire(asked, BYTE)
    asked = _OPS.get(op)
    if asked is None:
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point:
        return None
    if dtype.is_complex:
        return None if op is ReduceOp.PRODUCT else NcclWire(asked, TYPES[_REAL[dtype]], 2)
    wider = _WIDER.get(dtype)
    return NcclWire(asked, TYPES[wider or dtype], 1, wider)
