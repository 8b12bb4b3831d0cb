"""The collectives of a layout change as objects, each with its own backward.

`Move.run` is the forward; autograd calls `Move.pull` with the gradient of the result. `pull` uses
moves again, so that a gradient can be differentiated too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coordinator.layout.moving.swap import swap
from coordinator.layout.planning.plan import NEUTRAL
from device_comm import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.group import GroupCoordinator


class Move(ABC):
    """A differentiable function of one tensor, computed together with the other members."""

    def __call__(self, x: Tensor) -> Tensor:
        """`run`, recorded by autograd. Collective: as `run`."""
        return _Moved.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The forward; the result shares no memory with ``x``, except in `Copy`."""

    @abstractmethod
    def pull(self, grad: Tensor) -> Tensor:
        """The backward: the gradient of the input, given the gradient of the result."""


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
    """From shards to the whole. Backward: this rank's shard of the gradient."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.all_gather(x, self.dim)
        return self.group.all_gatherv(x, self.dim, self.sizes)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return Split(self.dim, self.group, self.sizes)(grad)


@dataclass(frozen=True, slots=True)
class Split(Move):
    """From the whole to this rank's shard. Backward: the shards of the gradient, gathered."""

    dim: int
    group: GroupCoordinator
    sizes: tuple[int, ...]

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
    """From shards of one dimension to shards of another. Backward: the reverse."""

    gather_dim: int
    shard_dim: int
    group: GroupCoordinator
    before: tuple[int, ...]
    after: tuple[int, ...]

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
    """From shards of one dimension to shards of other sizes. Backward: the reverse."""

    dim: int
    group: GroupCoordinator
    before: tuple[int, ...]
    after: tuple[int, ...]

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
    """From parts, cut along several dimensions, to the whole. Backward: this rank's part.

    ``shape`` is the whole's; ``boxes`` has each rank's slices of the whole.
    """

    shape: tuple[int, ...]
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
    """From the whole to this rank's part. Backward: the parts, assembled. As `Assemble`."""

    shape: tuple[int, ...]
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
    """From terms to their reduction. Backward: the gradient times the term's weight."""

    group: GroupCoordinator
    op: ReduceOp

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        return self.group.all_reduce(x, op=self.op)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class ReduceScatter(Move):
    """From terms to this rank's shard of their reduction. Backward: gathered, times the weight."""

    dim: int
    group: GroupCoordinator
    op: ReduceOp
    sizes: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        if len(set(self.sizes)) == 1:
            return self.group.reduce_scatter(x, self.dim, op=self.op)
        return self.group.reduce_scatterv(x, self.dim, self.sizes, op=self.op)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        whole = Gather(self.dim, self.group, self.sizes)(grad)
        return _scaled(whole, _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class AsTerm(Move):
    """From the whole to this rank's term. Backward: the gradient divided by the term's weight."""

    group: GroupCoordinator
    op: ReduceOp

    def run(self, x: Tensor) -> Tensor:
        """Collective: no."""
        if self.group.rank_in_group == 0 or self.op not in NEUTRAL:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.full_like(x, NEUTRAL[self.op], memory_format=torch.contiguous_format)

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: no."""
        return _scaled(grad, 1 / _term_weight(self.group, self.op))


@dataclass(frozen=True, slots=True)
class Copy(Move):
    """The identity. Backward: the sum of all ranks' gradients."""

    group: GroupCoordinator

    def run(self, x: Tensor) -> Tensor:
        """Collective: no. Returns a view."""
        return x.view_as(x)

    def pull(self, grad: Tensor) -> Tensor:
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
