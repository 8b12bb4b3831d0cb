"""Check and arrange the arguments of verbs with pure functions, without communication.

A verb has two overloads, since Python cannot add a keyword to the signature of another function
(PEP 612). Verbs that pass a computed ``async_op`` on to others have ``self: Any``, at no cost.

A verb with a ``dim`` sees a tensor as (outer, count, rest): the dimensions before ``dim``, then
``count`` equal pieces of ``dim`` with all later dimensions. Backends need (count, outer, rest).
With one outer row, as always with ``dim`` 0, both have the same memory, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Literal, Required, SupportsIndex, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

from shm_broadcast.deadline import Deadline

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
    """Return None if ``x`` owns dense memory, else a description of its kind.

    A subclass that handles operations itself, such as DTensor, wraps other tensors.
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
    # torch.compile warns of builtins that it does not support.
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
    """Require that no two elements of an output share memory."""
    if 0 in out.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)
    ):
        raise ValueError("the output is expanded: several of its elements are one in memory")


def check_dim(dim: int, x: Tensor) -> int:
    """Return ``dim`` counted from the front; raise for tensors without dimensions."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, not {dim!r}")
    count = x.dim()
    if not -count <= dim < count:
        raise ValueError(f"dim {dim} is out of range for a tensor of {count} dimensions")
    return dim % count


def check_shape(label: str, size: Shape) -> tuple[int, ...]:
    """Return ``size`` as a shape; an int is one dimension."""
    given = (size,) if hasattr(size, "__index__") else size
    if not isinstance(given, (tuple, Sequence)) or isinstance(given, (str, bytes)):
        raise TypeError(f"{label} must be an int or a sequence of ints, not {size!r}")
    try:
        shape = tuple(map(_whole, given))
    except TypeError:
        raise TypeError(f"{label} must be an int or a sequence of ints, not {size!r}") from None
    if shape and min(shape) < 0:
        raise ValueError(f"{label} must not be negative: {size}")
    return shape


def check_rank(label: str, rank: object, world_size: int) -> int:
    """Require a non-negative rank of the group; return it as an int."""
    try:
        number = _whole(rank)
    except TypeError:
        raise TypeError(f"{label} must be a rank in the group, not {rank!r}") from None
    if not 0 <= number < world_size:
        raise ValueError(f"{label}={number} is not a rank of a group of {world_size}")
    return number


def check_peer(label: str, peer: object, rank: int, world_size: int) -> int:
    """Require a rank of the group other than ``rank``; return it as an int."""
    number = check_rank(label, peer, world_size)
    if number == rank:
        raise ValueError(f"{label}={number} is this rank itself")
    return number


def check_sizes(label: str, sizes: object, world_size: int) -> tuple[int, ...]:
    """Require one non-negative size per rank."""
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
    """Return an integer, NumPy's included, as an int; raise `TypeError` for others and bool."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(value)
    return index(value)


def check_total(label: str, sizes: Sequence[int], total: int, dim: int) -> None:
    """Require that ``sizes`` add up to the ``total`` rows of a tensor."""
    if sum(sizes) != total:
        raise ValueError(f"{label} add up to {sum(sizes)}; dimension {dim} has {total}")


def equal_share(total: int, world_size: int, dim: int) -> int:
    """Return each rank's share of ``total`` rows; they must divide evenly."""
    if total % world_size:
        raise ValueError(f"dimension {dim} has {total} rows, not divisible by {world_size} ranks")
    return total // world_size


Timeout: TypeAlias = float | Deadline | None
"""The time limit of a call in seconds, or a deadline; None: the group's default."""

Sizes: TypeAlias = Sequence[int] | None
"""Rows of each rank; None: equal on all ranks."""

Out: TypeAlias = Tensor | None
"""The tensor for the result; None: a new one."""


class Now(TypedDict, total=False):
    """Keywords of a call that returns its result."""

    async_op: Literal[False]
    timeout: Timeout


class Later(TypedDict, total=False):
    """Keywords of a call that returns a `Work` of its result."""

    async_op: Required[Literal[True]]
    timeout: Timeout


class Maybe(TypedDict, total=False):
    """Keywords of a call that returns Any."""

    async_op: bool
    timeout: Timeout


if TYPE_CHECKING:
    Empty = Callable[[Sequence[int], torch.dtype, Tensor | None], Tensor]
    """`device_comm.backend.Backend.empty`."""
    OutputBuffer = tuple[Tensor, Callable[[], Tensor] | None]
    """The backend's output, and the last step, which returns the result (None: the output)."""


def materialized(x: Tensor) -> Tensor:
    """Return ``x`` or a copy: contiguous, without autograd history or lazy conjugation."""
    if x.requires_grad:
        x = x.detach()
    if is_materialized(x):
        return x
    return x.resolve_conj().resolve_neg().contiguous()


def is_materialized(x: Tensor) -> bool:
    """Return True if the elements of ``x`` are contiguous and not lazy."""
    return x.is_contiguous() and not x.is_neg() and not (x.is_complex() and x.is_conj())


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if the storages of ``a`` and ``b`` overlap."""
    first, second = a.untyped_storage(), b.untyped_storage()
    begin, start = first.data_ptr(), second.data_ptr()
    return begin < start + second.nbytes() and start < begin + first.nbytes()


def resized(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return ``shape`` with ``rows`` in dimension ``dim``."""
    sizes = list(shape)
    sizes[dim] = rows
    return tuple(sizes)


def row_elements(shape: Sequence[int], dim: int) -> int:
    """Return the elements of one row along ``dim``."""
    return math.prod(resized(shape, dim, 1))


def elements_of(rows: Sequence[int], row: int) -> tuple[int, ...]:
    """Return the elements of each count in ``rows``, with ``row`` elements per row."""
    return tuple(count * row for count in rows)


def rows_before(shape: Sequence[int], dim: int) -> int:
    """Return the number of outer rows: the product of the dimensions before ``dim``."""
    return math.prod(tuple(shape)[:dim]) if dim else 1  # a slice of torch.Size is slow


def pack_pieces(x: Tensor, dim: int, count: int) -> Tensor:
    """Return ``x`` with its ``count`` pieces along ``dim`` consecutive and contiguous."""
    outer = rows_before(x.shape, dim)
    if outer == 1 or x.numel() == 0:
        return materialized(x)
    return materialized(x.reshape(outer, count, x.numel() // (outer * count)).transpose(0, 1))


def output_buffer(
    empty: Empty,
    out: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    source: Tensor | None,
) -> OutputBuffer:
    """Return the buffer for a result of ``shape``; check ``out``.

    ``source`` is read during the write, so the buffer must not share its memory. None: only ``out``
    itself is read; it was checked as an input. ``like`` has the result's dtype and device.
    """
    if out is None:
        return empty(shape, like.dtype, like), None
    if source is None:
        check_apart(out)
    else:
        check_out(out, shape, like.dtype, like.device)
    given = out
    target = out.detach() if out.requires_grad else out
    if (source is None or not shares_memory(target, source)) and is_materialized(target):
        return target, lambda: given
    buffer = empty(shape, like.dtype, like)

    def finish() -> Tensor:
        target.copy_(buffer)
        return given

    return buffer, finish


def output_pieces(
    empty: Empty,
    out: Tensor | None,
    shape: tuple[int, ...],
    dim: int,
    count: int,
    like: Tensor,
    source: Tensor,
) -> OutputBuffer:
    """Return the buffer for ``count`` consecutive pieces of a result of ``shape``."""
    outer = rows_before(shape, dim)
    if outer == 1 or not (numel := math.prod(shape)):
        return output_buffer(empty, out, shape, like, source)
    if out is not None:
        check_out(out, shape, like.dtype, like.device)
    rest = numel // (outer * count)
    buffer = empty((count, outer, rest), like.dtype, like)

    def finish() -> Tensor:
        result = empty(shape, like.dtype, like) if out is None else out
        target = result.detach()
        if is_materialized(target):
            target.view(outer, count, rest).copy_(buffer.transpose(0, 1))
        else:
            target.copy_(buffer.transpose(0, 1).reshape(shape))
        return result

    return buffer, finish
