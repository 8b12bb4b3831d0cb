"""A rank that moves tensors from layout to layout, and knows by hand what it then has to hold.

Where DTensor has both layouts, its answer is compared as well.
"""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from coordinator.layout import (
    Layout,
    Partial,
    Replicate,
    Shard,
    SubMesh,
    load_sharded,
    redistribute,
    redistribute_between,
    save_sharded,
)
from coordinator.layout.dtensor import to_dtensor
from device_comm import ReduceOp
from tests.coordinator.layout.by_hand import hold, of_gradient, share
from tests.device_comm.oracle import same
from tests.fuzz.program import lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from coordinator import GroupCoordinator
    from coordinator.layout import Axis
    from tests.fuzz.faults import Fault
    from tests.fuzz.fleet import Post
    from tests.fuzz.moves import Move

_OF_DTENSOR = (torch.float32, torch.float64, torch.int32, torch.int64)
"""The types that gloo reduces and gathers."""


class MovingRank:
    """A rank that carries out moves."""

    def __init__(self, post: Post) -> None:
        logging.getLogger("torch").setLevel(logging.ERROR)  # of what DTensor finds suboptimal
        self._post = post
        self._groups: dict[tuple[tuple[int, ...], ...], GroupCoordinator] = {}
        self._device_meshes: dict[tuple[int, ...], DeviceMesh] = {}
        everyone = SubMesh(tuple(range(post.n)))
        (self._world,) = self._axes(everyone)

    def run(self, move: Move, _: Fault | None) -> str:
        """Carry out a move; what went wrong, or ``""``."""
        ways = {
            "redistribute": self._redistribute,
            "between": self._between,
            "checkpoint": self._by_checkpoint,
        }
        try:
            ways[move.way](move)
        except Exception as error:  # noqa: BLE001 - all that goes wrong is the answer
            for group in self._groups.values():
                group.abort(error)
            return traceback.format_exc()
        return ""

    def _redistribute(self, move: Move) -> None:
        axes = self._axes(move.source_mesh)
        x = _part(move, move.source, axes).requires_grad_(move.gradient)
        before = x.detach().clone()
        found = redistribute(x, move.source, move.target, axes, shape=move.shape)
        same(x, before)
        if not move.target.has_terms:
            same(found, _held(move.whole, move.target, axes))
        everywhere = Layout((Replicate(),) * len(axes))
        back = redistribute(found.detach(), move.target, everywhere, axes, shape=move.shape)
        same(back, move.whole)
        if move.gradient:
            (gradient,) = torch.autograd.grad(found, x, _upstream(move, axes))
            same(gradient, _gradient(move, axes))
        if _dtensor_has(move):
            mesh = self._device_mesh(move.source_mesh)
            theirs = to_dtensor(before.contiguous(), move.source, mesh, move.shape)
            placements = to_dtensor(found.detach(), move.target, mesh, move.shape).placements
            same(theirs.redistribute(placements=placements).to_local(), found.detach())

    def _between(self, move: Move) -> None:
        rank = self._post.rank
        has, gets = rank in move.source_mesh.ranks, rank in move.target_mesh.ranks
        x = None
        if has:
            x = _part(move, move.source, move.source_mesh.places(rank))
            x.requires_grad_(move.gradient)
        found = redistribute_between(
            x,
            move.source,
            move.target,
            self._world,
            source_mesh=move.source_mesh,
            target_mesh=move.target_mesh,
            shape=move.shape,
            dtype=move.dtype,
            requires_grad=move.gradient,
        )
        if not gets:
            assert found.numel() == 0
        elif not move.target.has_terms:
            same(found, _held(move.whole, move.target, move.target_mesh.places(rank)))
        back = redistribute_between(
            found.detach() if gets else None,
            move.target,
            Replicate(),
            self._world,
            source_mesh=move.target_mesh,
            target_mesh=SubMesh((0,)),
            shape=move.shape,
            dtype=move.dtype,
        )
        if rank == 0:
            same(back, move.whole)
        if move.gradient:
            upstream = _upstream(move, move.target_mesh.places(rank)) if gets else found.detach()
            found.backward(upstream)
            if x is not None:
                same(x.grad, _gradient(move, move.source_mesh.places(rank)))

    def _by_checkpoint(self, move: Move) -> None:
        axes = self._axes(move.source_mesh)
        x = _part(move, move.source, axes)
        file = self._post.folder / "moved.safetensors"
        save_sharded(file, {"x": x}, {"x": move.source}, axes, shapes={"x": move.shape})
        same(load_file(file)["x"], move.whole)
        if not move.target.has_terms:
            places = move.target_mesh.places(self._post.rank)
            found = load_sharded(file, {"x": move.target}, places)["x"]
            same(found, _held(move.whole, move.target, places))
        self._world.barrier()  # before the next one is written there

    def _axes(self, mesh: SubMesh) -> list[GroupCoordinator]:
        """The groups along the axes of a mesh; those with the same members are made once."""
        grid = torch.tensor(mesh.ranks).view(mesh.shape)
        found = []
        for axis, size in enumerate(mesh.shape):
            rows = grid.movedim(axis, -1).reshape(-1, size).tolist()
            members = tuple(map(tuple, rows))
            if members not in self._groups:
                name = f"axis {axis} of {mesh.shape}"
                self._groups[members] = self._post.make_group(name, members)
            found.append(self._groups[members])
        return found

    def _device_mesh(self, mesh: SubMesh) -> DeviceMesh:
        if mesh.shape not in self._device_meshes:
            self._device_meshes[mesh.shape] = init_device_mesh("cpu", mesh.shape)
        return self._device_meshes[mesh.shape]


def _held(whole: Tensor, layout: Layout, axes: Sequence[Axis]) -> Tensor:
    """What a rank holds of a tensor of any dtype."""
    if layout.has_terms or whole.dtype.is_complex:
        return hold(whole, layout, axes)
    alike = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.dtype.itemsize]
    return hold(whole.view(alike), layout, axes).view(whole.dtype)


def _part(move: Move, layout: Layout, axes: Sequence[Axis]) -> Tensor:
    return lay_out(_held(move.whole, layout, axes), move.memory)


def _upstream(move: Move, axes: Sequence[Axis]) -> Tensor:
    """What a rank gets of the gradient of the whole, which is three times the whole and one."""
    gradient = hold(move.whole * 3 + 1, of_gradient(move.target), axes)
    return gradient * share(move.target, move.target_mesh.shape)


def _gradient(move: Move, axes: Sequence[Axis]) -> Tensor:
    """What then has to come back."""
    gradient = hold(move.whole * 3 + 1, of_gradient(move.source), axes)
    return gradient * share(move.source, move.source_mesh.shape)


def _dtensor_has(move: Move) -> bool:
    """Whether DTensor knows both layouts, and goes from one to the other."""
    known = all(
        placement == Partial(ReduceOp.SUM)
        or not isinstance(placement, (Partial, Shard))
        or (isinstance(placement, Shard) and not placement.padded and placement.sizes is None)
        for placement in (*move.source.placements, *move.target.placements)
    )
    return known and not move.target.has_terms and move.dtype in _OF_DTENSOR
