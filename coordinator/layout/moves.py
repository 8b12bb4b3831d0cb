"""Run the collectives of a layout change, each with its own backward.

`Move.forward` is the forward; autograd calls `Move.backward` with the gradient of the result.
`backward` uses moves again, so a gradient is differentiable too.

A term is one rank's summand of a reduction (`Partial`); a shard is one rank's slice (`Shard`).

    forward           backward              gradients
    gather            split                 a replicated tensor's gradient is replicated
    split             gather                a shard's gradient is its shard of the gradient
    all_to_all        all_to_all            likewise
    recut             recut                 likewise
    reduce            identity              a term's gradient is that of the sum; AVG: / ranks
    reduce_scatter    gather                likewise
    as_term           identity              AVG: * ranks
    copy              all-reduce            replicated input; its gradient arrives as terms

The backward of gather slices the gradient without summing: every rank has the whole gradient. If
the ranks have terms of the gradient instead, `copy` sums them.

No function changes its input. In a group of one they return it. For every function: Collective:
yes, every member (`split`, `as_term` and `copy` communicate in backward only, or not at all).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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


class Move(ABC):
    """A differentiable function of one tensor, computed by all members together."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `forward`, recorded by autograd. Collective: as `forward`."""
        return _Moved.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Compute the forward; the result shares no memory with ``x``, except in `Copy`."""

    @abstractmethod
    def backward(self, grad: Tensor) -> Tensor:
        """Compute the gradient of the input from the gradient of the result."""


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.backward(grad), None


@dataclass(frozen=True, slots=True)
class Gather(Move):
    """Gather shards to the whole tensor. Backward: this rank's shard of the gradient."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.all_gather(x, self.dim)
        return self.group.all_gatherv(x, self.dim, self.sizes)

    def backward(self, grad: Tensor) -> Tensor:
        """Return a copy of this rank's part."""
        return Split(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class Split(Move):
    """Slice this rank's shard. Backward: the gathered shards of the gradient."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's part."""
        rank = self.group.rank_in_group
        own = x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])
        return own.clone(memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Gather(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class AllToAll(Move):
    """Turn shards of one dimension into shards of another. Backward: the reverse."""

    gather_dim: int
    shard_dim: int
    group: GroupCoordinator
    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        shapes = []
        for size in self.before:
            shape = list(x.shape)
            shape[self.gather_dim] = size
            shape[self.shard_dim] = self.after[self.group.rank_in_group]
            shapes.append(shape)
        pieces = torch.split(x, list(self.after), self.shard_dim)
        return torch.cat(swap(pieces, shapes, self.group), self.gather_dim)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return AllToAll(self.shard_dim, self.gather_dim, self.group, self.after, self.before)(grad)


@dataclass(frozen=True, slots=True)
class Recut(Move):
    """Turn shards of one dimension into shards of other sizes. Backward: the reverse."""

    dim: int
    group: GroupCoordinator
    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        rank = self.group.rank_in_group
        start = sum(self.before[:rank])
        pieces = [
            x.narrow(self.dim, low - start, high - low) if low < high else x.narrow(self.dim, 0, 0)
            for low, high in _overlaps(self.before, rank, self.after)
        ]
        shapes = [
            (*x.shape[: self.dim], high - low, *x.shape[self.dim + 1 :])
            for low, high in _overlaps(self.after, rank, self.before)
        ]
        return torch.cat(swap(pieces, shapes, self.group), self.dim)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Recut(self.dim, self.group, self.after, self.before)(grad)


@dataclass(frozen=True, slots=True)
class Assemble(Move):
    """Assemble the whole tensor from parts cut along several dimensions. Backward: `Cut`.

    ``shape`` is the whole tensor's; ``boxes`` has each rank's slices of the whole tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        whole = x.new_empty(self.shape)
        views = [whole[box] for box in self.boxes]
        sizes = [view.numel() for view in views]
        parts = torch.split(self.group.all_gatherv(x.reshape(-1), 0, sizes), sizes)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))
        return whole

    def backward(self, grad: Tensor) -> Tensor:
        """Return a copy of this rank's part."""
        return Cut(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Cut(Move):
    """Cut this rank's part from the whole tensor. Backward: `Assemble`."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's part."""
        own = x[self.boxes[self.group.rank_in_group]]
        return own.clone(memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Assemble(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Reduce(Move):
    """Reduce terms. Backward: the gradient times the term's weight."""

    group: GroupCoordinator
    op: ReduceOp

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        return self.group.all_reduce(x, op=self.op)

    def backward(self, grad: Tensor) -> Tensor:
        """Return ``grad`` times the weight."""
        return _scaled(grad, _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class ReduceScatter(Move):
    """Reduce terms to this rank's shard. Backward: gathered gradient times the weight."""

    dim: int
    group: GroupCoordinator
    op: ReduceOp
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.reduce_scatter(x, self.dim, op=self.op)
        return self.group.reduce_scatterv(x, self.dim, self.sizes, op=self.op)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        whole = Gather(self.dim, self.group, self.sizes)(grad)
        return _scaled(whole, _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class AsTerm(Move):
    """Turn the whole tensor into terms. Backward: the gradient divided by the weight."""

    group: GroupCoordinator
    op: ReduceOp

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's term, as a copy."""
        if self.group.rank_in_group == 0 or self.op not in NEUTRAL:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.full_like(x, NEUTRAL[self.op], memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Return ``grad`` divided by the weight."""
        return _scaled(grad, 1 / _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class Copy(Move):
    """The identity. Backward: the sum of all ranks' gradients."""

    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Return a view."""
        return x.view_as(x)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Reduce(self.group, ReduceOp.SUM)(grad)


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
    shard_sizes = _shards(x.shape[dim], group, sizes)
    return Gather(dim, group, shard_sizes)(x)


def split(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's shard of ``x`` along ``dim``, as a copy; ``x`` is the same on all ranks.

    Without ``sizes`` the shards are as `Shard` divides, possibly uneven.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    return Split(dim, group, _cut(x.shape[dim], group, sizes))(x)


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
    after = _cut(x.shape[sharded], group, shard_sizes)
    return AllToAll(gathered, sharded, group, before, after)(x)


def recut(
    x: Tensor, dim: int, group: GroupCoordinator, before: Sequence[int], after: Sequence[int]
) -> Tensor:
    """Turn shards of sizes ``before`` along ``dim`` into shards of sizes ``after``, by rank."""
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    held = _shards(x.shape[dim], group, before)
    return Recut(dim, group, held, _cut(sum(held), group, after))(x)


def reduce(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Return the reduction of all ranks' terms; ``x`` is this rank's term.

    Raises NotImplementedError if ``x`` requires a gradient and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    return Reduce(group, op)(x)


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
    return ReduceScatter(dim, group, op, _cut(x.shape[dim], group, sizes))(x)


def as_term(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Return this rank's term; all terms reduce to ``x``, which is the same on all ranks.

    Rank 0 keeps the values and the others get the operation's neutral element (0 for SUM). For AVG,
    MIN, MAX and BAND all ranks keep the values. Exact for every dtype. Raises as `reduce`.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    return AsTerm(group, op)(x)


def copy(x: Tensor, group: GroupCoordinator) -> Tensor:
    """Return a view of ``x``, the same on all ranks; backward sums all ranks' gradients."""
    if group.world_size == 1:
        return x
    return Copy(group)(x)


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


def _cut(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sizes of all ranks' shards of ``rows`` rows."""
    if sizes is None:
        return Shard().cut(rows, group.world_size)
    checked = check_sizes("sizes", sizes, group.world_size)
    if sum(checked) != rows:
        raise ValueError(f"sizes {list(checked)} do not add up to {rows}")
    return checked
