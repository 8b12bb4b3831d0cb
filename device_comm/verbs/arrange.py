"""Between the shapes that callers use and the contiguous tensors that backends move.

A verb with a ``dim`` sees a tensor as (outer, count, rest): the dimensions before ``dim``
together, then ``count`` equal pieces of ``dim`` with all that follows. Backends want the
pieces first: (count, outer, rest). With one outer row, and so always with ``dim`` 0, the two
are the same memory, and nothing is copied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from device_comm.verbs.checks import check_apart, check_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    Empty = Callable[[Sequence[int], torch.dtype, Tensor | None], Tensor]
    """`device_comm.backend.Backend.empty`."""
    Landing = tuple[Tensor, Callable[[], Tensor] | None]
    """Where a backend writes, and the last step that returns the result (None: it is that)."""


def plain(x: Tensor) -> Tensor:
    """``x`` itself or a copy of it: contiguous, no autograd history, nothing lazy."""
    if x.requires_grad:
        x = x.detach()
    if is_plain(x):
        return x
    return x.resolve_conj().resolve_neg().contiguous()


def is_plain(x: Tensor) -> bool:
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


def pieces_first(x: Tensor, dim: int, count: int) -> Tensor:
    """``x`` with its ``count`` pieces along ``dim`` one after the other, contiguous."""
    outer = rows_before(x.shape, dim)
    if outer == 1 or x.numel() == 0:
        return plain(x)
    return plain(x.reshape(outer, count, x.numel() // (outer * count)).transpose(0, 1))


def landing(
    empty: Empty,
    out: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    source: Tensor | None,
) -> Landing:
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
    if (source is None or not shares_memory(target, source)) and is_plain(target):
        return target, lambda: given
    buffer = empty(shape, like.dtype, like)

    def finish() -> Tensor:
        target.copy_(buffer)
        return given

    return buffer, finish


def landing_pieces(
    empty: Empty,
    out: Tensor | None,
    shape: tuple[int, ...],
    dim: int,
    count: int,
    like: Tensor,
    source: Tensor,
) -> Landing:
    """A landing for ``count`` pieces, one after the other, of a result of ``shape``."""
    outer = rows_before(shape, dim)
    if outer == 1 or not (numel := math.prod(shape)):
        return landing(empty, out, shape, like, source)
    if out is not None:
        check_out(out, shape, like.dtype, like.device)
    rest = numel // (outer * count)
    buffer = empty((count, outer, rest), like.dtype, like)

    def finish() -> Tensor:
        result = empty(shape, like.dtype, like) if out is None else out
        target = result.detach()
        if is_plain(target):
            target.view(outer, count, rest).copy_(buffer.transpose(0, 1))
        else:
            target.copy_(buffer.transpose(0, 1).reshape(shape))
        return result

    return buffer, finish
