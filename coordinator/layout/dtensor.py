"""Convert between layouts and torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed.tensor as dt
from torch import Tensor

from coordinator.layout.placement import Layout, Partial, Place, Placement, Replicate, Shard
from device_comm import ReduceOp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
_NAMES = {op: name for name, op in _OPS.items()}


def to_dtensor(
    local: Tensor,
    layout: Layout | Placement,
    mesh: DeviceMesh,
    shape: Sequence[int] | None = None,
) -> dt.DTensor:
    """Return a DTensor whose local part is ``local``, with shared memory. Differentiable.

    Args:
        local: this rank's part.
        layout: the tensor's layout on ``mesh``, without padding or explicit sizes.
        mesh: the device mesh.
        shape: the whole tensor's shape; None: sharded dimensions divide evenly.

    Raises:
        ValueError: DTensor lacks the layout, or ``local`` has another shape than the layout.
    """
    placements = [_to_torch(placement) for placement in Layout.of(layout).placements]
    if shape is None:
        return dt.DTensor.from_local(local, mesh, placements, run_check=False)
    expected = Layout.of(layout).local_shape(shape, _places(mesh))
    if tuple(local.shape) != expected:
        raise ValueError(
            f"this rank has {tuple(local.shape)}; {layout} of {shape} needs {expected}"
        )
    stride = torch.empty(tuple(shape), device="meta").stride()
    return dt.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def from_dtensor(x: dt.DTensor) -> tuple[Tensor, Layout, tuple[int, ...]]:
    """Return a DTensor's local part (shared memory), its layout, and the whole tensor's shape.

    Raises:
        ValueError: ``x`` has a placement other than Shard, Replicate and Partial.
    """
    layout = Layout(tuple(_from_torch(placement) for placement in x.placements))
    return x.to_local(), layout, tuple(x.shape)


def set_process_group(x: dt.DTensor, mesh: DeviceMesh) -> dt.DTensor:
    """Return a replicated DTensor on another mesh; it shares the memory of ``x``.

    Raises:
        ValueError: ``x`` is not replicated: use `redistribute_between`.
    """
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(f"only a replicated tensor can change its mesh; got {x.placements}")
    placements = [dt.Replicate()] * mesh.ndim
    return dt.DTensor.from_local(x.to_local(), mesh, placements, run_check=False)


def _to_torch(placement: Placement) -> dt.Placement:
    if isinstance(placement, Shard) and not placement.padded and placement.sizes is None:
        return dt.Shard(placement.dim)
    if isinstance(placement, Partial) and placement.op in _NAMES:
        return dt.Partial(_NAMES[placement.op])
    if isinstance(placement, Replicate):
        return dt.Replicate()
    raise ValueError(f"DTensor has no {placement}")


def _from_torch(placement: dt.Placement) -> Placement:
    if type(placement) is dt.Shard:
        return Shard(placement.dim)
    if type(placement) is dt.Partial and placement.reduce_op in _OPS:
        return Partial(_OPS[placement.reduce_op])
    if type(placement) is dt.Replicate:
        return Replicate()
    raise ValueError(f"there is no placement for DTensor's {placement}")


def _places(mesh: DeviceMesh) -> list[Place]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in the mesh")
    return [Place(place, size) for place, size in zip(coordinate, mesh.shape, strict=True)]
