"""Inputs that every rank can compute for every other, and results computed with plain torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from device_comm import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
MOVED = [*REDUCED, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
_BITWISE = [ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR]
_ORDERED = [ReduceOp.MIN, ReduceOp.MAX]
_PERIOD = 12
"""After so many numbers `values` gives the same again: modulo 4 and 3."""


def ops_for(dtype: torch.dtype) -> list[ReduceOp]:
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if dtype.is_complex:
        return [*ops, ReduceOp.AVG]
    if dtype.is_floating_point:
        return [*ops, *_ORDERED, ReduceOp.AVG]
    return [*ops, *_ORDERED, *_BITWISE]


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What rank ``rank`` gives: small whole numbers, so that every dtype computes exactly."""
    count = math.prod(shape)
    often = _period(rank, dtype, salt).repeat(-(-count // _PERIOD))
    return often[:count].clone().reshape(tuple(shape))


@lru_cache(maxsize=10_000)
def _period(rank: int, dtype: torch.dtype, salt: int) -> Tensor:
    """The first numbers of `values`, which come again and again."""
    index = torch.arange(_PERIOD)
    whole = ((index * 7 + rank * 5 + salt * 3) & 3) + 1
    if dtype is torch.bool:
        return whole > 2
    if dtype.is_complex:
        return torch.complex(whole.double(), ((index + rank) % 3 - 1).double()).to(dtype)
    if dtype in (torch.uint8, torch.int64, torch.uint16):
        whole = whole * 61  # sums and products that wrap around in uint8
    return whole.to(torch.float64).to(dtype)


def reduced(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The reduction of ``parts``, in a wide type, then converted back."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        stack = torch.stack(list(parts)).to(torch.int64)
        if op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND):
            return stack.sum(0) == len(parts)
        return stack.sum(0) % 2 == 1 if op is ReduceOp.BXOR else stack.sum(0) > 0
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not dtype.is_complex and not dtype.is_floating_point:
        wide = torch.int64
    stack = torch.stack([part.to(wide) for part in parts])
    if op is ReduceOp.SUM:
        total = stack.sum(0)
    elif op is ReduceOp.AVG:
        total = stack.sum(0) / len(parts)
    elif op is ReduceOp.PRODUCT:
        total = stack.prod(0)
    elif op is ReduceOp.MIN:
        total = stack.amin(0)
    elif op is ReduceOp.MAX:
        total = stack.amax(0)
    else:
        total = stack[0]
        for part in stack[1:]:
            if op is ReduceOp.BOR:
                total = total | part
            elif op is ReduceOp.BAND:
                total = total & part
            else:
                total = total ^ part
    return total.to(dtype)


def strided(x: Tensor) -> Tensor:
    """The values of ``x`` in a tensor that is not contiguous."""
    wide = torch.zeros((*x.shape, 2), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def same(result: Tensor | None, expected: Tensor) -> None:
    """Require equal shape, dtype and values; halves and averages may round once."""
    assert result is not None
    result = result.detach().cpu()
    assert result.dtype == expected.dtype, f"{result.dtype} is not {expected.dtype}"
    assert result.shape == expected.shape, f"{tuple(result.shape)} is not {tuple(expected.shape)}"
    if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:
        result, expected = result.float(), expected.float()
    if torch.equal(result, expected):
        return
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        torch.testing.assert_close(result, expected)
    else:
        raise AssertionError(f"{result.tolist()} is not {expected.tolist()}")
