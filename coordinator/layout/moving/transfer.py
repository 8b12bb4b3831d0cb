"""Moves one tensor from mesh to mesh, as a differentiable `Move`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from coordinator.layout.differentiable import require_linear
from coordinator.layout.moving.moves import Move
from coordinator.layout.moving.redistribute import strip
from coordinator.layout.moving.swap import swap
from coordinator.layout.placement import Layout, Partial, Replicate
from coordinator.layout.planning.plan import NEUTRAL
from coordinator.layout.planning.route import by_box, route
from device_comm import ReduceOp, check_reduction, reduce_in_rank_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.layout.planning.route import Piece, SubMesh


@dataclass(frozen=True, slots=True)
class Transfer(Move):
    """From a layout on one mesh to a layout on another. Backward: the reverse.

    Attributes:
        shape: the whole tensor's shape.
        source: the layout on ``source_mesh``.
        source_mesh: the source mesh, as ranks in ``group``.
        target: the layout on ``target_mesh``.
        target_mesh: the target mesh, as ranks in ``group``.
        group: contains all ranks of both meshes; it may have others.
    """

    shape: tuple[int, ...]
    source: Layout
    source_mesh: SubMesh
    target: Layout
    target_mesh: SubMesh
    group: GroupCoordinator

    def __post_init__(self) -> None:
        """Check that the group has all ranks of both meshes."""
        for rank in (*self.source_mesh.ranks, *self.target_mesh.ranks):
            if rank >= self.group.world_size:
                raise ValueError(f"rank {rank} is not in a group of {self.group.world_size}")

    def prepare(self, x: Tensor | None, dtype: torch.dtype | None, requires_grad: bool) -> Tensor:
        """This rank's part without padding; outside the source mesh a tensor without elements.

        Raises:
            ValueError: ``x`` is missing, or has another shape or dtype than it must.
            TypeError: a reduction is not defined for the dtype.
            NotImplementedError: ``x`` requires a gradient, and a reduction is not differentiable
                here.
        """
        rank = self.group.rank_in_group
        if rank not in self.source_mesh.ranks:
            if dtype is None:
                raise ValueError("dtype= is needed where there is no tensor")
            x = torch.empty(0, dtype=dtype, device=self.group.device, requires_grad=requires_grad)
        else:
            held = self.source.extents(self.shape, self.source_mesh.places(rank))
            wanted = tuple(extent.length for extent in held)
            if x is None or tuple(x.shape) != wanted or dtype not in (None, x.dtype):
                found = None if x is None else (tuple(x.shape), x.dtype)
                raise ValueError(
                    f"this rank gives {found}; {self.source} of {self.shape} has {wanted} here, "
                    f"of {dtype or 'any dtype'}"
                )
            x = strip(x, held)
        for layout in (self.source, self.target):
            op = _reduction(layout)
            if op is not None:
                check_reduction(op, x.dtype)
                require_linear(x, op)
        return x

    def run(self, x: Tensor) -> Tensor:
        """Collective: yes."""
        pieces = route(self.shape, self.source, self.source_mesh, self.target, self.target_mesh)
        rank = self.group.rank_in_group
        given: list[list[Piece]] = [[] for _ in range(self.group.world_size)]
        taken: list[list[Piece]] = [[] for _ in range(self.group.world_size)]
        for piece in pieces:
            if piece.source == rank:
                given[piece.target].append(piece)
            if piece.target == rank:
                taken[piece.source].append(piece)
        received = swap(
            [self._packed(x, each) for each in given],
            [(sum(math.prod(piece.shape) for piece in each),) for each in taken],
            self.group,
        )
        parts = {
            piece: part.view(piece.shape)
            for each, data in zip(taken, received, strict=True)
            for piece, part in zip(
                each, torch.split(data, [math.prod(piece.shape) for piece in each]), strict=True
            )
        }
        mine = [piece for piece in pieces if piece.target == rank]
        return self._assembled(x, mine, [parts[piece] for piece in mine])

    def pull(self, grad: Tensor) -> Tensor:
        """Collective: yes."""
        back = replace(
            self,
            source=_of_gradient(self.target),
            source_mesh=self.target_mesh,
            target=_of_gradient(self.source),
            target_mesh=self.source_mesh,
        )
        factor = _term_weight(self.source, self.source_mesh) / _term_weight(
            self.target, self.target_mesh
        )
        return back(grad) if factor == 1 else back(grad) * factor

    def _packed(self, x: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The pieces for one rank, flattened and concatenated."""
        if not pieces:
            return x.new_empty(0)
        held = self.source.extents(self.shape, self.source_mesh.places(self.group.rank_in_group))
        return torch.cat([x[piece.view(held)].reshape(-1) for piece in pieces])

    def _assembled(self, like: Tensor, pieces: Sequence[Piece], parts: Sequence[Tensor]) -> Tensor:
        """This rank's part on the target mesh, put together from the pieces that it received."""
        rank = self.group.rank_in_group
        if rank not in self.target_mesh.ranks:
            return like.new_empty(0)
        held = self.target.extents(self.shape, self.target_mesh.places(rank))
        neutral = NEUTRAL.get(_reduction(self.target) or ReduceOp.SUM, 0)
        result = like.new_full([extent.size for extent in held], neutral)
        op = _reduction(self.source)
        for _, numbers in by_box(pieces):
            room = result[pieces[numbers[0]].view(held)]
            if op is None:
                room.copy_(parts[numbers[0]])
            else:
                reduce_in_rank_order([parts[number] for number in numbers], op, room)
        return result


def _reduction(layout: Layout) -> ReduceOp | None:
    """The reduction of a layout's `Partial` placements; None if it has none."""
    return next((p.op for p in layout.placements if isinstance(p, Partial)), None)


def _of_gradient(layout: Layout) -> Layout:
    """The layout of the gradient: a term's gradient is that of the sum, so it is replicated."""
    return Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def _term_weight(layout: Layout, mesh: SubMesh) -> float:
    """The weight of one term in the reduction: 1, or 1 / terms for AVG."""
    return math.prod(
        1 / size
        for placement, size in zip(layout.placements, mesh.shape, strict=True)
        if isinstance(placement, Partial) and placement.op is ReduceOp.AVG
    )
