"""Changes the layout of a tensor on the ranks of one mesh, differentiably."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn import functional

from coordinator.layout import differentiable
from coordinator.layout.placement import Layout, Partial, Shard
from coordinator.layout.planning.costs import MeshCosts
from coordinator.layout.planning.plan import NEUTRAL, plan

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.layout.placement import Extent, Placement
    from coordinator.layout.planning.arrangement import Arrangement
    from coordinator.layout.planning.plan import Plan, Step


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
        target: the layout wanted.
        group: the group along each axis of the mesh, outermost first; or the only one.
        shape: the whole tensor's shape; needed if ``source`` shards it.
        costs: the mesh's costs, from `calibrate_mesh`, the same on all ranks. None: all axes cost
            the same.

    Returns:
        This rank's part in the new layout, with zeros for padding; ``x`` itself or a view of it if
        nothing has to move.

    Raises:
        ValueError: a layout does not fit the mesh or the shape, ``x`` has another shape than
            ``source`` says, or ``shape`` is missing. Nothing was sent.
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
        raise ValueError(f"the costs are of a mesh of {costs.shape}; this one is {mesh}")
    steps = plan(source, target, whole, costs, x.element_size())
    held = source.extents(whole, axes)
    kept = target.extents(whole, axes)
    found = tuple(extent.length for extent in held)
    if tuple(x.shape) != found:
        raise ValueError(f"this rank has {tuple(x.shape)}; {source} of {whole} is {found} here")
    x = strip(x, held)
    for step in steps.steps:
        x = take_step(steps, step, x, axes)
    return pad(x, kept)


def take_step(steps: Plan, step: Step, x: Tensor, axes: Sequence[GroupCoordinator]) -> Tensor:
    """Carry out one step of a plan. Collective: yes, every member along the step's axis."""
    source, target, group = step.source, step.target, axes[step.axis]
    here = [axis.rank_in_group for axis in axes]

    def sizes(arrangement: Arrangement, dim: int) -> tuple[int, ...]:
        """How many elements of a dimension each rank along the step's axis holds."""
        places = ([*here[: step.axis], r, *here[step.axis + 1 :]] for r in range(group.world_size))
        return tuple(arrangement.extents(steps.shape, steps.mesh, at)[dim].size for at in places)

    if isinstance(target, Partial):
        if not isinstance(source, Shard):
            return differentiable.as_term(x, group, target.op)
        # This rank's shard at its place in the whole, surrounded by the neutral element.
        held, rank = sizes(step.before, source.dim), group.rank_in_group
        margins = [0, 0] * (x.dim() - source.dim - 1) + [sum(held[:rank]), sum(held[rank + 1 :])]
        return functional.pad(x, margins, value=NEUTRAL[target.op])
    if isinstance(source, Partial):
        if not isinstance(target, Shard):
            return differentiable.reduce(x, group, source.op)
        after = sizes(step.after, target.dim)
        return differentiable.reduce_scatter(x, target.dim, group, source.op, after)
    if isinstance(source, Shard):
        before = sizes(step.before, source.dim)
        if not isinstance(target, Shard):
            return differentiable.gather(x, source.dim, group, before)
        after = sizes(step.after, target.dim)
        if source.dim == target.dim:
            return differentiable.recut(x, source.dim, group, before, after)
        return differentiable.all_to_all(x, source.dim, target.dim, group, before, after)
    dim = target.dim if isinstance(target, Shard) else 0
    return differentiable.split(x, dim, group, sizes(step.after, dim))


def strip(x: Tensor, extents: Sequence[Extent]) -> Tensor:
    """A view of ``x`` without padding; ``x`` itself if there is none."""
    for dim, extent in enumerate(extents):
        if extent.padding:
            x = x.narrow(dim, 0, extent.size)
    return x


def pad(x: Tensor, extents: Sequence[Extent]) -> Tensor:
    """``x`` padded with zeros; ``x`` itself if there is no padding."""
    if not any(extent.padding for extent in extents):
        return x
    margins = [margin for extent in reversed(extents) for margin in (0, extent.padding)]
    return functional.pad(x, margins)


def whole_shape(x: Tensor, source: Layout, axes: Sequence[GroupCoordinator]) -> tuple[int, ...]:
    """The whole tensor's shape, if the layout does not shard it: then it is that of ``x``.

    Raises:
        ValueError: the layout shards the tensor.
    """
    for axis, placement in zip(axes, source.placements, strict=False):
        if isinstance(placement, Shard) and axis.world_size > 1:
            raise ValueError(f"its shape is needed: a shard of {source} does not tell the whole's")
    return tuple(x.shape)
