"""Moving tensors from one mesh to another, with gradients: any layouts, any sizes of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.layout.placement import Layout
from coordinator.layout.redistribute import pad
from coordinator.layout.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.layout.placement import Placement
    from coordinator.layout.route import SubMesh


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
    """Move a tensor from one mesh to another; they may share ranks, all, some or none.

    Every part travels once to each rank that needs it and does not have it, in one exchange.
    Terms travel all, and are reduced where they arrive, in the order of the source mesh.

    Args:
        x: what this rank holds of it, padding included; None on ranks outside ``source_mesh``.
        source: how it lies on ``source_mesh``. A lone placement is for a mesh of one axis.
        target: how it shall lie on ``target_mesh``.
        group: has all ranks of both meshes.
        source_mesh: ranks in ``group``.
        target_mesh: ranks in ``group``.
        shape: of the whole tensor.
        dtype: its dtype; needed where ``x`` is None.
        requires_grad: whether ``x`` requires a gradient where there is one; for the others.

    Returns:
        What this rank holds then: a new tensor, with zeros for padding. Outside
        ``target_mesh`` a tensor of no elements: if it requires a gradient, backward has to be
        called on it as well, so that this rank takes part.

    Raises:
        ValueError: a layout does not fit its mesh or the shape, ``x`` has not the shape that
            ``source`` says, or it is missing. Nothing has been sent.
        NotImplementedError: ``x`` requires a gradient, and some reduction is neither SUM nor
            AVG.

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
        tensors: what this rank holds, by name; empty outside ``source_mesh``.
        source: how each lies on ``source_mesh``.
        target: how each shall lie on ``target_mesh``; its names are those that are moved.
        group: has all ranks of both meshes.
        source_mesh: ranks in ``group``.
        target_mesh: ranks in ``group``.
        wholes: by name, anything of the whole tensor's shape and dtype: the model's
            parameters on the ``meta`` device will do.

    Returns:
        What this rank holds then, by name; empty outside ``target_mesh``.

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
