"""The collectives of a layout change, each with its own backward.

`Move.forward` is the forward; autograd calls `Move.backward` with the gradient of the result.
`backward` uses moves again, so that a gradient can be differentiated too.

A term is one rank's summand of a reduction (`Partial`); a shard is one rank's slice (`Shard`).

    forward           backward              gradients
    gather            split                 a replicated tensor's gradient is replicated
    split             gather                a shard's gradient is its shard of the gradient
    all_to_all        all_to_all            likewise
    recut             recut                 likewise
    reduce            identity              a term's gradient is that of the sum; AVG: / ranks
    reduce_scatter    gather                likewise
    as_term           identity              AVG: * ranks
    copy              all-reduce            replicated input, whose gradient comes as terms

The backward of gather takes this rank's slice of the gradient and sums nothing: every rank has the
whole gradient already. If the ranks have terms of the gradient instead, `copy` sums them.

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
    """Send ``pieces[r]`` to rank r; return the pieces that come from each rank, by rank.

    Args:
        pieces: one for each rank, of any shapes, all of one dtype; may be empty.
        shapes: the shape of the piece that comes from each rank.
        group: the group of the ranks.

    Collective: yes, every member.
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
    """A differentiable function of one tensor, computed together with the other members."""

    def __call__(self, x: Tensor) -> Tensor:
        """`forward`, recorded by autograd. Collective: as `forward`."""
        return _Moved.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The forward; the result shares no memory with ``x``, except in `Copy`."""

    @abstractmethod
    def backward(self, grad: Tensor) -> Tensor:
        """The backward: the gradient of the input, given the gradient of the result."""


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
    """From shards to the whole. Backward: this rank's shard of the gradient."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.all_gather(x, self.dim)
        return self.group.all_gatherv(x, self.dim, self.sizes)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return Split(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class Split(Move):
    """From the whole to this rank's shard. Backward: the shards of the gradient, gathered."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Collective: no."""
        rank = self.group.rank_in_group
        own = x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])
        return own.clone(memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Gather(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class AllToAll(Move):
    """From shards of one dimension to shards of another. Backward: the reverse."""

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
    """From shards of one dimension to shards of other sizes. Backward: the reverse."""

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
    """From parts, cut along several dimensions, to the whole. Backward: this rank's part.

    ``shape`` is the whole's; ``boxes`` has each rank's slices of the whole.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        whole = x.new_empty(self.shape)
        rooms = [whole[box] for box in self.boxes]
        sizes = [room.numel() for room in rooms]
        parts = torch.split(self.group.all_gatherv(x.reshape(-1), 0, sizes), sizes)
        for room, part in zip(rooms, parts, strict=True):
            room.copy_(part.view(room.shape))
        return whole

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return Cut(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Cut(Move):
    """From the whole to this rank's part. Backward: the parts, assembled. As `Assemble`."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Collective: no."""
        own = x[self.boxes[self.group.rank_in_group]]
        return own.clone(memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Assemble(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Reduce(Move):
    """From terms to their reduction. Backward: the gradient times the term's weight."""

    group: GroupCoordinator
    op: ReduceOp

    def forward(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        return self.group.all_reduce(x, op=self.op)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class ReduceScatter(Move):
    """From terms to this rank's shard of their reduction. Backward: gathered, times the weight."""

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
    """From the whole to this rank's term. Backward: the gradient divided by the term's weight."""

    group: GroupCoordinator
    op: ReduceOp

    def forward(self, x: Tensor) -> Tensor:
        """Collective: no."""
        if self.group.rank_in_group == 0 or self.op not in NEUTRAL:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.full_like(x, NEUTRAL[self.op], memory_format=torch.contiguous_format)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, 1 / _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class Copy(Move):
    """The identity. Backward: the sum of all ranks' gradients."""

    group: GroupCoordinator

    def forward(self, x: Tensor) -> Tensor:
        """Collective: no. Returns a view."""
        return x.view_as(x)

    def backward(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Reduce(self.group, ReduceOp.SUM)(grad)


def _overlaps(ours: tuple[int, ...], rank: int, theirs: tuple[int, ...]) -> list[tuple[int, int]]:
    """The overlap of part ``rank`` of ``ours`` with each part of ``theirs``, as (start, stop)."""
    start = sum(ours[:rank])
    stop = start + ours[rank]
    found = []
    low = 0
    for size in theirs:
        overlap = max(low, start), min(low + size, stop)
        found.append(overlap if overlap[0] < overlap[1] else (0, 0))
        low += size
    return found


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _term_weight(group: GroupCoordinator, op: ReduceOp) -> float:
    """The weight of one rank's term in the reduction: 1, or 1/N for AVG."""
    return 1 / group.world_size if op is ReduceOp.AVG else 1.0


def gather(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' shards, concatenated along ``dim`` in rank order.

    Args:
        x: this rank's shard, (..., sizes[rank], ...).
        dim: the dimension that is sharded.
        group: the group of the ranks.
        sizes: the size of each rank's shard along ``dim``; None: all are equal.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    known = _shards(x.shape[dim], group, sizes)
    return Gather(dim, group, known)(x)


def split(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard of ``x`` along ``dim``, as a copy.

    Args:
        x: the whole tensor, the same on all ranks.
        dim: the dimension to shard.
        group: the group of the ranks.
        sizes: the size of each rank's shard; None: as `Shard` divides, unevenly if need be.
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

    Args:
        x: this rank's shard along ``gather_dim``; whole along ``shard_dim``.
        gather_dim: the dimension along which ``x`` is sharded.
        shard_dim: the dimension along which the result is sharded.
        group: the group of the ranks.
        gather_sizes: the size of each rank's shard before; None: all are equal.
        shard_sizes: the size of each rank's shard after; None: as `Shard` divides.
    """
    if group.world_size == 1:
        return x
    given, taken = check_dim(gather_dim, x), check_dim(shard_dim, x)
    if given == taken:
        raise ValueError(f"dimension {taken} cannot be gathered and cut at once: use recut")
    before = _shards(x.shape[given], group, gather_sizes)
    after = _cut(x.shape[taken], group, shard_sizes)
    return AllToAll(given, taken, group, before, after)(x)


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
    """The reduction of all ranks' terms; ``x`` is this rank's term.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
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
    """This rank's shard, along ``dim``, of the reduction of all ranks' terms.

    ``sizes`` has the size of each rank's shard; None: as `Shard` divides.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    dim = check_dim(dim, x)
    return ReduceScatter(dim, group, op, _cut(x.shape[dim], group, sizes))(x)


def as_term(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Terms whose reduction is ``x``, which is the same on all ranks; returns this rank's term.

    Rank 0 keeps the values and the others get the operation's neutral element (0 for SUM). For AVG,
    MIN, MAX and BAND all ranks keep the values. Exact for every dtype.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    return AsTerm(group, op)(x)


def copy(x: Tensor, group: GroupCoordinator) -> Tensor:
    """A view of ``x``, which is the same on all ranks; backward sums all ranks' gradients."""
    if group.world_size == 1:
        return x
    return Copy(group)(x)


def require_linear(x: Tensor, op: ReduceOp) -> None:
    """Accept a reduction of ``x`` that autograd need not know, or that has a gradient here.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if x.requires_grad and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise NotImplementedError(f"{op.name} has no gradient here: detach the tensor")


def _shards(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of all ranks' shards; this rank's shard has ``rows`` rows."""
    if sizes is None:
        return (rows,) * group.world_size
    known = check_sizes("sizes", sizes, group.world_size)
    if known[group.rank_in_group] != rows:
        raise ValueError(f"sizes are {list(known)}; rank {group.rank_in_group} has {rows}")
    return known


def _cut(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of all ranks' shards of ``rows`` rows."""
    if sizes is None:
        return Shard().cut(rows, group.world_size)
    known = check_sizes("sizes", sizes, group.world_size)
    if sum(known) != rows:
        raise ValueError(f"sizes {list(known)} do not add up to {rows}")
    return known
