"""How numbers of several ranks become one: the operations, what they accept, and what they mean.

`reduce_in_rank_order` defines the result: it begins with rank 0's value and takes the others in
rank order; half precision is accumulated in float32. Whatever reduces in Python calls it.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class ReduceOp(IntEnum):
    """The reductions, numbered as in Bagua; torch is told their names, never their numbers.

    On bool tensors SUM and MAX are "any", PRODUCT and MIN are "all". AVG is for floating
    point and complex tensors: an average of integers that rounds is not offered.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10

    @property
    def torch(self) -> dist.ReduceOp:
        """The operation of the same name in ``torch.distributed``."""
        return dist.ReduceOp(getattr(dist.ReduceOp, self.name))


_BITWISE = frozenset({ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_ACCUMULATE_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_MOVED_ONLY = frozenset({torch.uint64, torch.complex32})
_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def check_reduction(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise `TypeError` unless ``op`` is a `ReduceOp` that is defined for ``dtype``."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a coordinator.ReduceOp, not {op!r}")
    objection = _objection(op, dtype)
    if objection:
        raise TypeError(objection)


@cache
def _objection(op: ReduceOp, dtype: torch.dtype) -> str:
    real_float = dtype.is_floating_point
    if (real_float and dtype.itemsize == 1) or dtype in _MOVED_ONLY:
        return f"{dtype} tensors are moved but not reduced; convert to a wider type"
    if op in _BITWISE and (real_float or dtype.is_complex):
        return f"{op.name} is for integer and bool tensors, not {dtype}"
    if op in _ORDERED and dtype.is_complex:
        return f"{op.name} is not defined for {dtype}: complex numbers have no order"
    if op is ReduceOp.AVG and not (real_float or dtype.is_complex):
        return f"AVG is for floating point and complex tensors, not {dtype}"
    return ""


def reduce_in_rank_order(parts: Sequence[Tensor], op: ReduceOp, output: Tensor) -> None:
    """Reduce ``parts``, one per rank, into ``output``.

    Args:
        parts: tensors of ``output``'s shape and dtype; they are not changed.
        op: a reduction that `check_reduction` accepts for their dtype.
        output: where the result goes; may be the first of ``parts``.
    """
    wide = _ACCUMULATE_IN.get(output.dtype, output.dtype)
    combine = _COMBINE[op]
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    if op is ReduceOp.AVG:
        total = total / len(parts)
    output.copy_(total)
