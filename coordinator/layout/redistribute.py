"""Change the layout of tensors, differentiably, on one mesh or from one mesh to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from coordinator.group import GroupCoordinator
from coordinator.layout import moves
from coordinator.layout.moves import moved, require_linear, swap
from coordinator.layout.placement import (
    Arrangement,
    Extent,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from coordinator.layout.plan import (
    NEUTRAL,
    MeshCosts,
    Piece,
    Plan,
    Step,
    SubMesh,
    by_box,
    plan,
    route,
)
from device_comm import ReduceOp, check_reduction, reduce_in_rank_order


def redistribute(
    x: Tensor,
    source: Layout | Placement,
    target: Layout | Placement,
    group: GroupCoordinator | Sequence[GroupCoordinator],
    *,
    shape: Sequence[int] | None = None,
    costs: MeshCosts | None = None,
) -> Tensor:
    """Change the layout of a tensor on the ranks of one mesh.

    The steps are those of `plan`. A shard's gradient is its shard of the gradient; a replicated
    tensor's gradient is replicated; a term's gradient is that of the sum.

    Args:
        x: this rank's part, padding included.
        source: the layout now. A single placement is for a mesh of one axis.
        target: the new layout.
        group: the group along each axis of the mesh, outermost first; or the only one.
        shape: the whole tensor's shape; required if ``source`` shards it.
        costs: the mesh's costs, from `calibrate_mesh`, the same on all ranks. None: equal on all
            axes.

    Returns:
        This rank's part in the new layout, with zeros for padding; ``x`` itself or a view of it if
        no data moves.

    Raises:
        ValueError: a layout does not fit the mesh or the shape, ``x`` has another shape than
            ``source`` requires, or ``shape`` is missing. Nothing was sent.
        NotImplementedError: ``x`` requires a gradient, and a reduction is neither SUM nor AVG.

    Collective: yes, every member of every group; backward too.
    """
    axes = tuple(group) if isinstance(group, Sequence) else (group,)
    source, target = Layout.of(source), Layout.of(target)
    whole = whole_shape(x, source, axes) if shape is None else tuple(shape)
    mesh = tuple(axis.world_size for axis in axes)
    if costs is None:
        costs = MeshCosts.uniform(mesh)
    elif costs.shape != mesh:
        raise ValueError(f"the mesh is {mesh}, but the costs are for {costs.shape}")
    steps = plan(source, target, whole, costs, x.element_size())
    held = source.extents(whole, axes)
    kept = target.extents(whole, axes)
    expected = tuple(extent.length for extent in held)
    if tuple(x.shape) != expected:
        raise ValueError(f"this rank has {tuple(x.shape)}; {source} of {whole} needs {expected}")
    x = strip(x, held)
    for step in steps.steps:
        x = take_step(steps, step, x, axes)
    return pad(x, kept)


def take_step(steps: Plan, step: Step, x: Tensor, axes: Sequence[GroupCoordinator]) -> Tensor:
    """Run one step of a plan. Collective: yes, every member along the step's axis."""
    source, target, group = step.source, step.target, axes[step.axis]
    coordinates = [axis.rank_in_group for axis in axes]

    def sizes(arrangement: Arrangement, dim: int) -> tuple[int, ...]:
        places = (
            [*coordinates[: step.axis], r, *coordinates[step.axis + 1 :]]
            for r in range(group.world_size)
        )
        return tuple(arrangement.extents(steps.shape, steps.mesh, at)[dim].size for at in places)

    if isinstance(target, Partial):
        if not isinstance(source, Shard):
            return moves.as_term(x, group, target.op)
        # The term is this rank's shard at its place, surrounded by the neutral element.
        held, rank = sizes(step.before, source.dim), group.rank_in_group
        margins = [0, 0] * (x.dim() - source.dim - 1) + [sum(held[:rank]), sum(held[rank + 1 :])]
        return functional.pad(x, margins, value=NEUTRAL[target.op])
    if isinstance(source, Partial):
        if not isinstance(target, Shard):
            return moves.reduce(x, group, source.op)
        after = sizes(step.after, target.dim)
        return moves.reduce_scatter(x, target.dim, group, source.op, after)
    if isinstance(source, Shard):
        before = sizes(step.before, source.dim)
        if not isinstance(target, Shard):
            return moves.gather(x, source.dim, group, before)
        after = sizes(step.after, target.dim)
        if source.dim == target.dim:
            return moves.recut(x, source.dim, group, before, after)
        return moves.all_to_all(x, source.dim, target.dim, group, before, after)
    dim = target.dim if isinstance(target, Shard) else 0
    return moves.split(x, dim, group, sizes(step.after, dim))


def strip(x: Tensor, extents: Sequence[Extent]) -> Tensor:
    """Return a view of ``x`` without padding; ``x`` itself if it has none."""
    for dim, extent in enumerate(extents):
        if extent.padding:
            x = x.narrow(dim, 0, extent.size)
    return x


def pad(x: Tensor, extents: Sequence[Extent]) -> Tensor:
    """Return ``x`` padded with zeros; ``x`` itself if there is no padding."""
    if not any(extent.padding for extent in extents):
        return x
    margins = [margin for extent in reversed(extents) for margin in (0, extent.padding)]
    return functional.pad(x, margins)


def whole_shape(x: Tensor, source: Layout, axes: Sequence[GroupCoordinator]) -> tuple[int, ...]:
    """Return the whole tensor's shape, that of ``x``; raise ValueError if it is sharded."""
    for axis, placement in zip(axes, source.placements, strict=False):
        if isinstance(placement, Shard) and axis.world_size > 1:
            raise ValueError(f"shape= is required: {source} shards the tensor")
    return tuple(x.shape)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move from a layout on one mesh to a layout on another. Backward: the reverse.

    ``shape`` is the whole tensor's. ``group`` contains all ranks of both meshes, which are ranks in
    it; it may have others.
    """

    shape: tuple[int, ...]
    source: Layout
    source_mesh: SubMesh
    target: Layout
    target_mesh: SubMesh
    group: GroupCoordinator

    def __post_init__(self) -> None:
        for rank in (*self.source_mesh.ranks, *self.target_mesh.ranks):
            if rank >= self.group.world_size:
                raise ValueError(f"rank {rank} is not in a group of {self.group.world_size}")

    def prepare(self, x: Tensor | None, dtype: torch.dtype | None, requires_grad: bool) -> Tensor:
        """Return this rank's part without padding; outside the source mesh an empty tensor.

        Raises ValueError, TypeError and NotImplementedError as `redistribute_between`.
        """
        rank = self.group.rank_in_group
        if rank not in self.source_mesh.ranks:
            if dtype is None:
                raise ValueError("dtype= is required where x is None")
            x = torch.empty(0, dtype=dtype, device=self.group.device, requires_grad=requires_grad)
        else:
            held = self.source.extents(self.shape, self.source_mesh.places(rank))
            expected = tuple(extent.length for extent in held)
            if x is None or tuple(x.shape) != expected or dtype not in (None, x.dtype):
                actual = None if x is None else (tuple(x.shape), x.dtype)
                raise ValueError(
                    f"this rank passes {actual}; {self.source} of {self.shape} needs {expected} "
                    f"of {dtype or 'any dtype'} on it"
                )
            x = strip(x, held)
        for layout in (self.source, self.target):
            op = _reduction(layout)
            if op is not None:
                check_reduction(op, x.dtype)
                require_linear(x, op)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's part of the new layout, differentiably. Collective: yes."""
        return moved(x, self._forward, self._backward)

    def _forward(self, x: Tensor) -> Tensor:
        pieces = route(self.shape, self.source, self.source_mesh, self.target, self.target_mesh)
        rank = self.group.rank_in_group
        outgoing: list[list[Piece]] = [[] for _ in range(self.group.world_size)]
        incoming: list[list[Piece]] = [[] for _ in range(self.group.world_size)]
        for piece in pieces:
            if piece.source == rank:
                outgoing[piece.target].append(piece)
            if piece.target == rank:
                incoming[piece.source].append(piece)
        received = swap(
            [self._packed(x, each) for each in outgoing],
            [(sum(math.prod(piece.shape) for piece in each),) for each in incoming],
            self.group,
        )
        parts = {
            piece: part.view(piece.shape)
            for each, data in zip(incoming, received, strict=True)
            for piece, part in zip(
                each, torch.split(data, [math.prod(piece.shape) for piece in each]), strict=True
            )
        }
        received_pieces = [piece for piece in pieces if piece.target == rank]
        return self._assembled(x, received_pieces, [parts[piece] for piece in received_pieces])

    def _backward(self, grad: Tensor) -> Tensor:
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
        if not pieces:
            return x.new_empty(0)
        held = self.source.extents(self.shape, self.source_mesh.places(self.group.rank_in_group))
        return torch.cat([x[piece.view(held)].reshape(-1) for piece in pieces])

    def _assembled(self, like: Tensor, pieces: Sequence[Piece], parts: Sequence[Tensor]) -> Tensor:
        rank = self.group.rank_in_group
        if rank not in self.target_mesh.ranks:
            return like.new_empty(0)
        held = self.target.extents(self.shape, self.target_mesh.places(rank))
        neutral = NEUTRAL.get(_reduction(self.target) or ReduceOp.SUM, 0)
        result = like.new_full([extent.size for extent in held], neutral)
        op = _reduction(self.source)
        for _, numbers in by_box(pieces):
            target = result[pieces[numbers[0]].view(held)]
            if op is None:
                target.copy_(parts[numbers[0]])
            else:
                reduce_in_rank_order([parts[number] for number in numbers], op, target)
        return result


def _reduction(layout: Layout) -> ReduceOp | None:
    return next((p.op for p in layout.placements if isinstance(p, Partial)), None)


def _of_gradient(layout: Layout) -> Layout:
    """Return the gradient's layout: a term's gradient is that of the sum, so replicated."""
    return Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def _term_weight(layout: Layout, mesh: SubMesh) -> float:
    """Return the weight of one term in the reduction: 1, or 1 / terms for AVG."""
    return math.prod(
        1 / size
        for placement, size in zip(layout.placements, mesh.shape, strict=True)
        if isinstance(placement, Partial) and placement.op is ReduceOp.AVG
    )


def redistribute_between(
    x: Tensor | None,
    source: Layout | Placement,
    target: Layout | Placement,
    group: GroupCoordinator,
    *,
    source_mesh: SubMesh,
    target_mesh: SubMesh,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Move a tensor from one mesh to another. The meshes may share all, some or no ranks.

    One exchange sends each part once to each rank that needs it and does not hold it. The receiver
    reduces all terms of a `Partial` tensor in the source mesh's order.

    Args:
        x: this rank's part, padding included; None on ranks outside ``source_mesh``.
        source: the layout on ``source_mesh``. A single placement is for a mesh of one axis.
        target: the layout on ``target_mesh``.
        group: contains all ranks of both meshes, which are ranks in it.
        source_mesh: the source mesh.
        target_mesh: the target mesh.
        shape: the whole tensor's shape.
        dtype: the tensor's dtype; required where ``x`` is None.
        requires_grad: where ``x`` is None: whether it requires a gradient on the other ranks.

    Returns:
        This rank's part on the target mesh: a new tensor, with zeros for padding. Outside
        ``target_mesh`` an empty tensor; if it requires a gradient, call backward on it too: this
        rank takes part in the exchange of gradients.

    Raises:
        ValueError: a layout does not fit its mesh or the shape, or ``x`` is missing or has another
            shape than ``source`` requires. Nothing was sent.
        TypeError: a reduction is not defined for the dtype.
        NotImplementedError: ``x`` requires a gradient, and a reduction is neither SUM nor AVG.

    Collective: yes, every member of ``group``; backward too.
    """
    whole = tuple(shape)
    move = Transfer(
        whole,
        Layout.of(source).normalized(len(whole)),
        source_mesh,
        Layout.of(target).normalized(len(whole)),
        target_mesh,
        group,
    )
    result = move(move.prepare(x, dtype, requires_grad))
    rank = group.rank_in_group
    if rank in target_mesh.ranks:
        result = pad(result, move.target.extents(whole, target_mesh.places(rank)))
    return result


def reshard(
    tensors: Mapping[str, Tensor],
    source: Mapping[str, Layout | Placement],
    target: Mapping[str, Layout | Placement],
    group: GroupCoordinator,
    *,
    source_mesh: SubMesh,
    target_mesh: SubMesh,
    wholes: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Move all tensors of a model from one mesh to another, one after the other.

    Args:
        tensors: this rank's parts, by name; empty outside ``source_mesh``.
        source: the layout of each tensor on ``source_mesh``.
        target: the layout on ``target_mesh`` of each tensor to move.
        group: contains all ranks of both meshes, which are ranks in it.
        source_mesh: the source mesh.
        target_mesh: the target mesh.
        wholes: by name, a tensor with the whole tensor's shape and dtype, such as the model's
            parameters on the ``meta`` device. Its values are not used.

    Returns this rank's parts on the target mesh, by name; empty outside ``target_mesh``.

    Raises:
        KeyError: a name is missing in ``source``, ``wholes``, or ``tensors``.
        ValueError: as `redistribute_between`.

    Collective: yes, every member of ``group``; the names in the same order.
    """
    rank = group.rank_in_group
    moved = {}
    for name, layout in target.items():
        part = redistribute_between(
            tensors[name].detach() if rank in source_mesh.ranks else None,
            source[name],
            layout,
            group,
            source_mesh=source_mesh,
            target_mesh=target_mesh,
            shape=wholes[name].shape,
            dtype=wholes[name].dtype,
        )
        if rank in target_mesh.ranks:
            moved[name] = part
    return moved
