"""Run the collectives of a layout change, each with its own backward.

The backward of a function is another function of this module, so a gradient is differentiable too.

A term is one rank's summand of a reduction (`Partial`); a shard is one rank's slice (`Shard`).

    forward           backward              gradients
    gather            split                 a replicated tensor's gradient is replicated
    split             gather                a shard's gradient is its shard of the gradient
    all_to_all        all_to_all            likewise
    recut             recut                 likewise
    reduce            identity              a term's gradient is that of the sum; AVG: / ranks
    reduce_scatter    gather                likewise
    as_term           identity              AVG: * ranks
    assemble          a copy of the part    as gather
    copy              all-reduce            replicated input; its gradient arrives as terms

The backward of gather slices the gradient without summing: every rank has the whole gradient. If
the ranks have terms of the gradient instead, `copy` sums them.

No function changes its input. In a group of one they return it. For every function: Collective:
yes, every member (`split`, `as_term` and `copy` communicate in backward only, or not at all).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coordinator.group import GroupCoordinator
from coordinator.layout.placement import Shard
from coordinator.layout.plan import NEUTRAL
from device_comm import ReduceOp
from device_comm.verbs.checks import check_dim, check_sizes


def swap(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: GroupCoordinator
) -> list[Tensor]:
    """Send ``pieces[r]`` to rank r; return the piece from each rank, of ``shapes``, by rank.

    The pieces may have any shapes and be empty; all have one dtype. Collective: yes, every member.
    """
    if group.world_size == 1:
        return list(pieces)
    sizes = [math.prod(shape) for shape in shapes]
    received = group.all_to_all(
        torch.cat([piece.reshape(-1) for piece in pieces]),
        input_sizes=[piece.numel() for piece in pieces],
        output_sizes=sizes,
    )
    parts = received.split(sizes)  # type: ignore[no-untyped-call]
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


Function = Callable[[Tensor], Tensor]


def moved(x: Tensor, forward: Function, backward: Function) -> Tensor:
    """Return ``forward(x)``; autograd calls ``backward`` with the gradient of the result."""
    return _Moved.apply(x, forward, backward)  # type: ignore[no-untyped-call, no-any-return]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Function, backward: Function) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _overlaps(own: tuple[int, ...], rank: int, other: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the overlap of part ``rank`` of ``own`` with each part of ``other``: (start, stop)."""
    start = sum(own[:rank])
    stop = start + own[rank]
    overlaps = []
    low = 0
    for size in other:
        overlap = max(low, start), min(low + size, stop)
        overlaps.append(overlap if overlap[0] < overlap[1] else (0, 0))
        low += size
    return overlaps


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _term_weight(group: GroupCoordinator, op: ReduceOp) -> float:
    """Return the weight of one rank's term in the reduction: 1, or 1/N for AVG."""
    return 1 / group.world_size if op is ReduceOp.AVG else 1.0


def gather(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return all ranks' shards, concatenated along ``dim`` in rank order.

    ``x`` is this rank's shard, (..., sizes[rank], ...). Without ``sizes`` all are equal.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    held = _shards(x.shape[dim], group, sizes)

    def forward(x: Tensor) -> Tensor:
        if len(set(held)) == 1:
            return group.all_gather(x, dim)
        return group.all_gatherv(x, dim, held)

    return moved(x, forward, lambda grad: split(grad, dim, group, held))


def split(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's shard of ``x`` along ``dim``, as a copy; ``x`` is the same on all ranks.

    Without ``sizes`` the shards are as `Shard` divides, possibly uneven.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    parts, rank = _parts(x.shape[dim], group, sizes), group.rank_in_group

    def forward(x: Tensor) -> Tensor:
        return _copy(x.narrow(dim, sum(parts[:rank]), parts[rank]))

    return moved(x, forward, lambda grad: gather(grad, dim, group, parts))


def all_to_all(
    x: Tensor,
    gather_dim: int,
    shard_dim: int,
    group: GroupCoordinator,
    gather_sizes: Sequence[int] | None = None,
    shard_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Turn shards along ``gather_dim`` into shards along ``shard_dim``, another dimension.

    ``x`` is whole along ``shard_dim``. Without ``gather_sizes`` all shards before are equal;
    without ``shard_sizes`` the shards after are as `Shard` divides.
    """
    if group.world_size == 1:
        return x
    gathered, sharded = check_dim(gather_dim, x), check_dim(shard_dim, x)
    if gathered == sharded:
        raise ValueError(f"gather_dim and shard_dim are both {sharded}: use recut")
    before = _shards(x.shape[gathered], group, gather_sizes)
    after = _parts(x.shape[sharded], group, shard_sizes)

    def forward(x: Tensor) -> Tensor:
        shapes = []
        for size in before:
            shape = list(x.shape)
            shape[gathered], shape[sharded] = size, after[group.rank_in_group]
            shapes.append(shape)
        pieces = torch.split(x, list(after), sharded)
        return torch.cat(swap(pieces, shapes, group), gathered)

    return moved(x, forward, lambda grad: all_to_all(grad, sharded, gathered, group, after, before))


def recut(
    x: Tensor, dim: int, group: GroupCoordinator, before: Sequence[int], after: Sequence[int]
) -> Tensor:
    """Turn shards of sizes ``before`` along ``dim`` into shards of sizes ``after``, by rank."""
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    held, rank = _shards(x.shape[dim], group, before), group.rank_in_group
    parts = _parts(sum(held), group, after)

    def forward(x: Tensor) -> Tensor:
        start = sum(held[:rank])
        pieces = [
            x.narrow(dim, low - start, high - low) if low < high else x.narrow(dim, 0, 0)
            for low, high in _overlaps(held, rank, parts)
        ]
        shapes = [
            (*x.shape[:dim], high - low, *x.shape[dim + 1 :])
            for low, high in _overlaps(parts, rank, held)
        ]
        return torch.cat(swap(pieces, shapes, group), dim)

    return moved(x, forward, lambda grad: recut(grad, dim, group, parts, held))


def assemble(
    x: Tensor,
    shape: Sequence[int],
    boxes: Sequence[tuple[slice, ...]],
    group: GroupCoordinator,
) -> Tensor:
    """Assemble the whole tensor, of ``shape``, from parts cut along several dimensions.

    ``boxes`` has each rank's slices of the whole tensor; ``x`` is this rank's part.
    """

    def forward(x: Tensor) -> Tensor:
        whole = x.new_empty(tuple(shape))
        views = [whole[box] for box in boxes]
        sizes = [view.numel() for view in views]
        parts = torch.split(group.all_gatherv(x.reshape(-1), 0, sizes), sizes)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))
        return whole

    return moved(x, forward, lambda grad: _cut(grad, boxes, group))


def _cut(x: Tensor, boxes: Sequence[tuple[slice, ...]], group: GroupCoordinator) -> Tensor:
    """Return a copy of this rank's part of the whole tensor ``x``: the reverse of `assemble`."""

    def forward(x: Tensor) -> Tensor:
        return _copy(x[boxes[group.rank_in_group]])

    shape = tuple(x.shape)  # the gradient function must not hold `x`
    return moved(x, forward, lambda grad: assemble(grad, shape, boxes, group))


def reduce(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Return the reduction of all ranks' terms; ``x`` is this rank's term.

    Raises NotImplementedError if ``x`` requires a gradient and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    weight = _term_weight(group, op)
    return moved(x, lambda x: group.all_reduce(x, op=op), lambda grad: _scaled(grad, weight))


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: GroupCoordinator,
    op: ReduceOp = ReduceOp.SUM,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return this rank's shard, along ``dim``, of the reduction of all ranks' terms.

    Without ``sizes`` the shards are as `Shard` divides. Raises as `reduce`.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    dim = check_dim(dim, x)
    parts, weight = _parts(x.shape[dim], group, sizes), _term_weight(group, op)

    def forward(x: Tensor) -> Tensor:
        if len(set(parts)) == 1:
            return group.reduce_scatter(x, dim, op=op)
        return group.reduce_scatterv(x, dim, parts, op=op)

    return moved(x, forward, lambda grad: _scaled(gather(grad, dim, group, parts), weight))


def as_term(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Return this rank's term; all terms reduce to ``x``, which is the same on all ranks.

    Rank 0 keeps the values and the others get the operation's neutral element (0 for SUM). For AVG,
    MIN, MAX and BAND all ranks keep the values. Exact for every dtype. Raises as `reduce`.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)

    def forward(x: Tensor) -> Tensor:
        if group.rank_in_group == 0 or op not in NEUTRAL:
            return _copy(x)
        return torch.full_like(x, NEUTRAL[op], memory_format=torch.contiguous_format)

    weight = _term_weight(group, op)
    return moved(x, forward, lambda grad: _scaled(grad, 1 / weight))


def copy(x: Tensor, group: GroupCoordinator) -> Tensor:
    """Return a view of ``x``, the same on all ranks; backward sums all ranks' gradients."""
    if group.world_size == 1:
        return x
    return moved(x, lambda x: x.view_as(x), lambda grad: reduce(grad, group))


def require_linear(x: Tensor, op: ReduceOp) -> None:
    """Raise NotImplementedError if autograd records a reduction other than SUM and AVG."""
    if x.requires_grad and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise NotImplementedError(f"{op.name} has no gradient: detach the tensor")


def _shards(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sizes of all ranks' shards; this rank's shard has ``rows`` rows."""
    if sizes is None:
        return (rows,) * group.world_size
    checked = check_sizes("sizes", sizes, group.world_size)
    if checked[group.rank_in_group] != rows:
        raise ValueError(f"sizes are {list(checked)}, but rank {group.rank_in_group} has {rows}")
    return checked


def _parts(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sizes of all ranks' shards of ``rows`` rows."""
    if sizes is None:
        return Shard().cut(rows, group.world_size)
    checked = check_sizes("sizes", sizes, group.world_size)
    if sum(checked) != rows:
        raise ValueError(f"sizes {list(checked)} do not add up to {rows}")
    return checked
