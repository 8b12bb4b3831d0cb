"""Moves tensors from one mesh to another, differentiably, for any layouts and mesh sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.layout.moving.redistribute import pad
from coordinator.layout.moving.transfer import Transfer
from coordinator.layout.placement import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.layout.placement import Placement
    from coordinator.layout.planning.route import SubMesh


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

    Each part is sent once to each rank that needs it and does not hold it, in one exchange. Of a
    `Partial` tensor all terms are sent, and reduced by the receiver in the source mesh's order.

    Args:
        x: this rank's part, padding included; None on ranks outside ``source_mesh``.
        source: the layout on ``source_mesh``. A single placement is for a mesh of one axis.
        target: the layout on ``target_mesh``.
        group: contains all ranks of both meshes.
        source_mesh: the source mesh, as ranks in ``group``.
        target_mesh: the target mesh, as ranks in ``group``.
        shape: the whole tensor's shape.
        dtype: the tensor's dtype; needed where ``x`` is None.
        requires_grad: where ``x`` is None: whether it requires a gradient on the other ranks.

    Returns:
        This rank's part on the target mesh: a new tensor, with zeros for padding. Outside
        ``target_mesh`` a tensor without elements; if it requires a gradient, backward must be
        called on it too, so that this rank takes part in the exchange of gradients.

    Raises:
        ValueError: a layout does not fit its mesh or the shape, or ``x`` is missing or has another
            shape than ``source`` says. Nothing was sent.
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
        target: the layout of each tensor on ``target_mesh``. The tensors that it names are moved.
        group: contains all ranks of both meshes.
        source_mesh: the source mesh, as ranks in ``group``.
        target_mesh: the target mesh, as ranks in ``group``.
        wholes: by name, a tensor with the whole's shape and dtype, such as the model's parameters
            on the ``meta`` device. Its values are not used.

    Returns:
        This rank's parts on the target mesh, by name; empty outside ``target_mesh``.

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
