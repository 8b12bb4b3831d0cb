"""Between the shapes that callers use and the flat, contiguous tensors that backends move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def plain(x: Tensor) -> Tensor:
    """``x`` itself or a copy of it: contiguous, no autograd history, nothing lazy."""
    if x.requires_grad:
        x = x.detach()
    if x.is_complex():
        x = x.resolve_conj()
    return x.resolve_neg().contiguous() if x.is_neg() else x.contiguous()


def is_plain(x: Tensor) -> bool:
    """Whether a backend may write into ``x``'s memory as it stands."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` are views of one storage: they may overlap."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def landing(
    out: Tensor | None,
    shape: Sequence[int],
    like: Tensor,
    inputs: Sequence[Tensor],
    *,
    in_place: bool = False,
) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Where a backend may write a result of ``shape``, and how that becomes the result.

    Args:
        out: what the caller wants filled; None: a new tensor.
        shape: the result's.
        like: gives dtype and device.
        inputs: tensors that the result must not overlap while it is written.
        in_place: ``out`` is the input, and the backend can work in place.

    Returns:
        A contiguous buffer, and the last step that returns the result; None: the buffer
        is the result.
    """
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device), None
    given = out
    target = out.detach()
    if is_plain(target) and (in_place or not any(shares_memory(target, x) for x in inputs)):
        return target, lambda: given
    buffer = torch.empty(shape, dtype=like.dtype, device=like.device)

    def finish() -> Tensor:
        target.copy_(buffer)
        return given

    return buffer, finish


def rows_first(x: Tensor, dim: int) -> Tensor:
    """``x`` with dimension ``dim`` in front, contiguous: a copy unless it is there already."""
    return plain(x.movedim(dim, 0) if dim else x)


def split_parts(x: Tensor, dim: int, parts: int) -> Tensor:
    """``x`` cut into equal parts along ``dim``: shape (parts, *shape of a part), contiguous."""
    return plain(_cut(x, dim, parts).movedim(dim, 0))


def resized(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """``shape`` with ``rows`` in dimension ``dim``."""
    return (*shape[:dim], rows, *shape[dim + 1 :])


def landing_parts(
    out: Tensor | None, x: Tensor, dim: int, parts: int
) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """A landing for ``parts`` tensors like ``x``, in a row, that become one along ``dim``."""
    shape = resized(x.shape, dim, parts * x.shape[dim])
    if dim == 0:
        return landing(out, shape, x, [x])
    buffer = torch.empty((parts, *x.shape), dtype=x.dtype, device=x.device)

    def finish() -> Tensor:
        result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        _cut(result.detach(), dim, parts).copy_(buffer.movedim(0, dim))
        return result

    return buffer, finish


def landing_rows(
    out: Tensor | None, x: Tensor, dim: int, rows: int
) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """A landing, rows first, for a result like ``x`` with ``rows`` in dimension ``dim``."""
    shape = resized(x.shape, dim, rows)
    if dim == 0:
        return landing(out, shape, x, [x])
    moved = (rows, *x.shape[:dim], *x.shape[dim + 1 :])
    buffer = torch.empty(moved, dtype=x.dtype, device=x.device)

    def finish() -> Tensor:
        result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        result.detach().movedim(dim, 0).copy_(buffer)
        return result

    return buffer, finish


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    """A view of ``x`` in which dimension ``dim`` is two: (parts, rows of a part)."""
    return x.unflatten(dim, (parts, x.shape[dim] // parts))  # type: ignore[no-untyped-call, no-any-return]
