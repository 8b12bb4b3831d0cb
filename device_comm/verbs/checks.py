"""Validation of what callers pass, before anything moves: `ValueError` or `TypeError`.

Pure functions; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

Shape = int | Sequence[int]
"""A tensor's shape; an int for one dimension."""


def check_tensor(label: str, x: object, device: torch.device) -> None:
    """Require a dense tensor on ``device``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{label} must be a tensor, not {type(x).__name__}")
    if (why := why_not_dense(x)) is not None:
        raise TypeError(f"{label} must be a dense tensor, not {why}")
    if x.device != device:
        raise ValueError(f"{label} is on {x.device}; this communicator moves tensors on {device}")


def why_not_dense(x: Tensor) -> str | None:
    """What ``x`` is instead of a tensor whose elements lie in memory of its own; None if it is.

    A subclass that handles operations itself, as DTensor does, wraps other tensors.
    """
    kind = type(x)
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}: pass the tensor it wraps, of its .to_local() or .wait()"
    if x.layout is not torch.strided or x.is_quantized:
        return f"{x.layout}, {x.dtype}"
    if x.is_nested:
        return "a nested one: pass the tensors of its unbind()"
    if x._is_zerotensor():  # autograd makes them
        return "one without memory: pass a clone() of it"
    # torch.compile warns of builtins that it does not know.
    if not is_compiling() and is_functorch_wrapped_tensor(x):
        return "one that vmap, grad or another function of torch.func has wrapped"
    return None


def check_out(
    out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Require that a result of ``shape`` and ``dtype`` fits ``out`` exactly."""
    check_tensor("out", out, device)
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}; the result is {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; the result has {tuple(shape)}")
    check_apart(out)


def check_apart(out: Tensor) -> None:
    """Require that no two elements of an output are one in memory."""
    if 0 in out.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)
    ):
        raise ValueError("the output is expanded: several of its elements are one in memory")


def check_dim(dim: int, x: Tensor) -> int:
    """Return ``dim`` counted from the front; tensors without dimensions have none."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, not {dim!r}")
    count = x.dim()
    if not -count <= dim < count:
        raise ValueError(f"dim {dim} is out of range for a tensor of {count} dimensions")
    return dim % count


def check_shape(label: str, size: Shape) -> tuple[int, ...]:
    """The shape that ``size`` says: an int stands for one dimension."""
    given = (size,) if isinstance(size, SupportsIndex) else size
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise TypeError(f"{label} must be an int or a sequence of ints, not {size!r}")
    try:
        shape = tuple(map(_whole, given))
    except TypeError:
        raise TypeError(f"{label} must be an int or a sequence of ints, not {size!r}") from None
    if shape and min(shape) < 0:
        raise ValueError(f"{label} must not be negative: {size}")
    return shape


def check_rank(label: str, rank: object, world_size: int) -> int:
    """Require a rank of the group, counted from 0: no negative ranks; the rank as an int."""
    try:
        number = _whole(rank)
    except TypeError:
        raise TypeError(f"{label} must be a rank in the group, not {rank!r}") from None
    if not 0 <= number < world_size:
        raise ValueError(f"{label}={number} is not a rank of a group of {world_size}")
    return number


def check_peer(label: str, peer: object, rank: int, world_size: int) -> int:
    """Require a rank of the group that is another than ``rank``; the rank as an int."""
    number = check_rank(label, peer, world_size)
    if number == rank:
        raise ValueError(f"{label}={number} is this rank itself")
    return number


def check_sizes(label: str, sizes: object, world_size: int) -> tuple[int, ...]:
    """Require one size of 0 or more for each rank."""
    if not isinstance(sizes, (tuple, list, Sequence)):
        raise TypeError(f"{label} must be a sequence of ints, not {sizes!r}")
    try:
        numbers = tuple(map(_whole, sizes))
    except TypeError:
        raise TypeError(f"{label} must be a sequence of ints, not {sizes!r}") from None
    if len(numbers) != world_size:
        raise ValueError(f"{label} has {len(numbers)} entries for a group of {world_size}")
    if min(numbers) < 0:
        raise ValueError(f"{label} must not be negative: {list(numbers)}")
    return numbers


def _whole(value: object) -> int:
    """``value`` as an int, NumPy's integers too.

    Raises:
        TypeError: it is none, or a bool.
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(value)
    return index(value)


def check_total(label: str, sizes: Sequence[int], total: int, dim: int) -> None:
    """Require that ``sizes`` cut up exactly the ``total`` rows that a tensor has."""
    if sum(sizes) != total:
        raise ValueError(f"{label} add up to {sum(sizes)}; dimension {dim} has {total}")


def equal_share(total: int, world_size: int, dim: int) -> int:
    """What each rank gets of ``total`` rows; they must divide."""
    if total % world_size:
        raise ValueError(f"dimension {dim} has {total} rows, not divisible by {world_size} ranks")
    return total // world_size
