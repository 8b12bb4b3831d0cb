"""Check and arrange what callers pass to verbs, before anything moves.

Pure functions; nothing here communicates.

A verb has three overloads, since Python cannot add a keyword to a signature that another has
(PEP 612), and a checker takes ``bool`` for neither of its two values.

A verb with a ``dim`` sees a tensor as (outer, count, rest): the dimensions before ``dim``
together, then ``count`` equal pieces of ``dim`` with all that follows. Backends want the
pieces first: (count, outer, rest). With one outer row, and so always with ``dim`` 0, the two
are the same memory, and nothing is copied.
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


Timeout: TypeAlias = float | Deadline | None
"""Seconds that a call may take, or until when; None: what the group allows."""

Sizes: TypeAlias = Sequence[int] | None
"""Rows of each rank; None: all have as many."""

Out: TypeAlias = Tensor | None
"""Where the result goes; None: into a new tensor."""


class Now(TypedDict, total=False):
    """Of a call that returns its result."""

    async_op: Literal[False]
    timeout: Timeout


class Later(TypedDict, total=False):
    """Of a call that returns a `Work` of its result."""

    async_op: Required[Literal[True]]
    timeout: Timeout


class Maybe(TypedDict, total=False):
    """Of a call that returns the one or the other."""

    async_op: bool
    timeout: Timeout


if TYPE_CHECKING:
    Empty = Callable[[Sequence[int], torch.dtype, Tensor | None], Tensor]
    """`device_comm.backend.Backend.empty`."""
    OutputBuffer = tuple[Tensor, Callable[[], Tensor] | None]
    """Where a backend writes, and the last step that returns the result (None: it is that)."""


def materialized(x: Tensor) -> Tensor:
    """``x`` itself or a copy of it: contiguous, no autograd history, nothing lazy."""
    if x.requires_grad:
        x = x.detach()
    if is_materialized(x):
        return x
    return x.resolve_conj().resolve_neg().contiguous()


def is_materialized(x: Tensor) -> bool:
    """Whether the elements of ``x`` lie in its memory in order and as they are."""
    return x.is_contiguous() and not x.is_neg() and not (x.is_complex() and x.is_conj())


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the storages of ``a`` and ``b`` lie over one another: so may the tensors."""
    first, second = a.untyped_storage(), b.untyped_storage()
    begin, start = first.data_ptr(), second.data_ptr()
    return begin < start + second.nbytes() and start < begin + first.nbytes()


def resized(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """``shape`` with ``rows`` in dimension ``dim``."""
    sizes = list(shape)
    sizes[dim] = rows
    return tuple(sizes)


def row_elements(shape: Sequence[int], dim: int) -> int:
    """Elements of one row along ``dim``."""
    return math.prod(resized(shape, dim, 1))


def elements_of(rows: Sequence[int], row: int) -> tuple[int, ...]:
    """Elements of each of so many rows of ``row`` elements."""
    return tuple(count * row for count in rows)


def rows_before(shape: Sequence[int], dim: int) -> int:
    """How many outer rows there are: the product of the dimensions before ``dim``."""
    return math.prod(tuple(shape)[:dim]) if dim else 1  # a slice of torch.Size is slow


def pack_pieces(x: Tensor, dim: int, count: int) -> Tensor:
    """``x`` with its ``count`` pieces along ``dim`` one after the other, contiguous."""
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
    """A landing for a result of ``shape``.

    Args:
        empty: makes a new contiguous tensor.
        out: what the caller wants filled; None: a new tensor.
        shape: the result's.
        like: of the result's dtype, on the device.
        source: what is read while the result is written; None: nothing but ``out`` itself, which
            has been checked as an input is. The rest is checked here.
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
    """A landing for ``count`` pieces, one after the other, of a result of ``shape``."""
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
