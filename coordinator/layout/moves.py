"""The collectives of a layout change as values, each knowing what to do with a gradient.

A move is run once forward; autograd calls its `pull` with the gradient of the result. `pull`
is made of moves again, so that a gradient has gradients too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coordinator.layout.plan import NEUTRAL
from coordinator.layout.swap import swap
from device_comm import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.group import GroupCoordinator

Sizes = tuple[int, ...]


class Move(ABC):
    """Takes one tensor to another, together with the other members of a group."""

    def __call__(self, x: Tensor) -> Tensor:
        """Run it, for autograd to see. Collective: as `run`."""
        return _Moved.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The result, in memory of its own."""

    @abstractmethod
    def pull(self, grad: Tensor) -> Tensor:
        """The gradient of what `run` was given, from that of its result."""


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.pull(grad), None


@dataclass(frozen=True, slots=True)
class Gather(Move):
    """Shards to the whole; of the gradient, this rank's shard."""

    dim: int
    group: GroupCoordinator
    sizes: Sizes

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.all_gather(x, self.dim)  # type: ignore[no-any-return]
        return self.group.all_gatherv(x, self.dim, self.sizes)  # type: ignore[no-any-return]

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return Split(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class Split(Move):
    """The whole to this rank's shard; of the gradient, shards to the whole."""

    dim: int
    group: GroupCoordinator
    sizes: Sizes

    def run(self, x: Tensor) -> Tensor:
        """Collective: no."""
        rank = self.group.rank_in_group
        own = x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])
        return own.clone(memory_format=torch.contiguous_format)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Gather(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class AllToAll(Move):
    """Shards of one dimension to shards of another; of the gradient, the reverse."""

    gather_dim: int
    shard_dim: int
    group: GroupCoordinator
    before: Sizes
    after: Sizes

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        shapes = []
        for size in self.before:
            shape = list(x.shape)
            shape[self.gather_dim] = size
            shape[self.shard_dim] = self.after[self.group.rank_in_group]
            shapes.append(shape)
        pieces = torch.split(x, list(self.after), self.shard_dim)
        return torch.cat(swap(pieces, shapes, self.group), self.gather_dim)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return AllToAll(self.shard_dim, self.gather_dim, self.group, self.after, self.before)(grad)


@dataclass(frozen=True, slots=True)
class Recut(Move):
    """Shards of one dimension to shards of other sizes; of the gradient, the reverse."""

    dim: int
    group: GroupCoordinator
    before: Sizes
    after: Sizes

    def run(self, x: Tensor) -> Tensor:
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

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Recut(self.dim, self.group, self.after, self.before)(grad)


@dataclass(frozen=True, slots=True)
class Assemble(Move):
    """Parts that are cut along several dimensions to the whole; of the gradient, this rank's part.

    ``boxes`` are the slices of the whole, of ``shape``, that each rank has.
    """

    shape: Sizes
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        whole = x.new_empty(self.shape)
        rooms = [whole[box] for box in self.boxes]
        sizes = [room.numel() for room in rooms]
        parts = torch.split(self.group.all_gatherv(x.reshape(-1), 0, sizes), sizes)
        for room, part in zip(rooms, parts, strict=True):
            room.copy_(part.view(room.shape))
        return whole

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return Cut(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Cut(Move):
    """The whole to this rank's part; of the gradient, parts to the whole. As `Assemble`."""

    shape: Sizes
    boxes: tuple[tuple[slice, ...], ...]
    group: GroupCoordinator

    def run(self, x: Tensor) -> Tensor:
        """Collective: no."""
        own = x[self.boxes[self.group.rank_in_group]]
        return own.clone(memory_format=torch.contiguous_format)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Assemble(self.shape, self.boxes, self.group)(grad)


@dataclass(frozen=True, slots=True)
class Reduce(Move):
    """Terms to their reduction; of the gradient, what each term counts for."""

    group: GroupCoordinator
    op: ReduceOp

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        return self.group.all_reduce(x, op=self.op)  # type: ignore[no-any-return]

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, _share(self.group, self.op))


@dataclass(frozen=True, slots=True)
class ReduceScatter(Move):
    """Terms to this rank's shard of their reduction; of the gradient, the whole."""

    dim: int
    group: GroupCoordinator
    op: ReduceOp
    sizes: Sizes

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.reduce_scatter(x, self.dim, op=self.op)  # type: ignore[no-any-return]
        return self.group.reduce_scatterv(  # type: ignore[no-any-return]
            x, self.dim, self.sizes, op=self.op
        )

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        whole = Gather(self.dim, self.group, self.sizes)(grad)
        return _scaled(whole, _share(self.group, self.op))


@dataclass(frozen=True, slots=True)
class AsTerm(Move):
    """The whole to this rank's term of it."""

    group: GroupCoordinator
    op: ReduceOp

    def run(self, x: Tensor) -> Tensor:
        """Collective: no."""
        if self.group.rank_in_group == 0 or self.op not in NEUTRAL:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.full_like(x, NEUTRAL[self.op], memory_format=torch.contiguous_format)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, 1 / _share(self.group, self.op))


@dataclass(frozen=True, slots=True)
class Copy(Move):
    """The same; of the gradient, whose terms the ranks have, the sum."""

    group: GroupCoordinator

    def run(self, x: Tensor) -> Tensor:
        """Collective: no. Returns a view."""
        return x.view_as(x)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        return Reduce(self.group, ReduceOp.SUM)(grad)


def _overlaps(ours: Sizes, rank: int, theirs: Sizes) -> list[tuple[int, int]]:
    """What part ``rank`` of ``ours`` shares with each part of ``theirs``, as (from, to)."""
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


def _share(group: GroupCoordinator, op: ReduceOp) -> float:
    """What a rank's term counts for in the reduction."""
    return 1 / group.world_size if op is ReduceOp.AVG else 1.0
