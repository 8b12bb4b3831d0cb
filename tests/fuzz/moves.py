"""Random changes of layout, and a rank that carries them out, and checks what it then holds."""

from __future__ import annotations

import itertools
import logging
import math
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
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
from tests.coordinator.layout.by_hand import hold, layouts, of_gradient, share
from tests.device_comm.oracle import MOVED, ops_for, same
from tests.fuzz.program import lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import SearchStrategy
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from coordinator import GroupCoordinator
    from coordinator.layout import Axis
    from tests.fuzz.fleet import Post
    from tests.fuzz.generate import Fault

    Draw = Callable[[SearchStrategy[Any]], Any]


WAYS = ("redistribute", "between", "checkpoint")
MEMORY = ("plain", "strided", "offset", "transposed")
MOST_ELEMENTS = 80_000
_LENGTHS = st.one_of(st.integers(0, 7), st.sampled_from([31, 257]))
_OFTEN = (torch.float64, torch.float32, torch.int64) * 4
"""The types with gradients, or that DTensor moves as well."""

_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)
_NOT_REDUCED = {torch.bool, *(each for each in MOVED if each.itemsize == 1), torch.bfloat16}


_NOT_REDUCED |= {torch.uint16, torch.uint32, torch.uint64}
"""Types in which terms of whole numbers cannot be made up, or are not exact."""


@dataclass(frozen=True)
class Move:
    way: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: str
    source_mesh: SubMesh
    source: Layout
    target_mesh: SubMesh
    target: Layout
    gradient: bool

    @property
    def whole(self) -> torch.Tensor:
        """The whole tensor: whole numbers, as different from each other as the type allows."""
        index = torch.arange(math.prod(self.shape)).reshape(self.shape)
        if self.dtype is torch.bool:
            return index % 3 == 0
        return ((index * 7 % 13 if self.dtype.itemsize < 4 else index) + 8).to(self.dtype)

    def __str__(self) -> str:
        ends = (
            f"{layout} on ranks {mesh.ranks} as {mesh.shape}"
            for layout, mesh in (
                (self.source, self.source_mesh),
                (self.target, self.target_mesh),
            )
        )
        gradient = " and its gradient back" if self.gradient else ""
        return (
            f"{self.way} of {self.dtype} {self.shape}, {self.memory} in memory{gradient}:\n"
            + "\n".join(ends)
        )


@st.composite
def moves(draw: Draw, n: int) -> Move:
    way = draw(st.sampled_from(WAYS))
    source_mesh = draw(_parts(n) if way == "between" else _grids(n))
    target_mesh = source_mesh
    if way != "redistribute":
        target_mesh = draw(_parts(n) if way == "between" else _grids(n))
    dtype = draw(st.sampled_from([*_OFTEN, *MOVED]))
    if way == "checkpoint" and dtype is torch.complex128:  # which the format does not have
        dtype = torch.complex64
    dims = draw(st.sampled_from([0, 1, 1, 2, 2, 2, 3, 3]))
    shape = tuple(draw(st.lists(_LENGTHS, min_size=dims, max_size=dims)))
    if math.prod(shape) > MOST_ELEMENTS:
        shape = tuple(min(length, 31) for length in shape)
    as_torch = way == "redistribute" and draw(st.booleans())
    gradient = dtype in _OFTEN and dtype.is_floating_point and draw(st.booleans())
    if gradient:
        ops = _LINEAR
    elif as_torch:
        ops = (ReduceOp.SUM,)
    else:
        ops = tuple(ops_for(dtype))
    if dtype in _NOT_REDUCED:
        ops = ()
    return Move(
        way,
        shape,
        dtype,
        draw(st.sampled_from(MEMORY)),
        source_mesh,
        draw(layouts(shape, source_mesh.shape, ops, as_torch)),
        target_mesh,
        draw(layouts(shape, target_mesh.shape, ops, as_torch)),
        gradient and way != "checkpoint",
    )


def _grids(n: int) -> SearchStrategy[SubMesh]:
    everyone = tuple(range(n))
    return st.sampled_from([SubMesh(everyone, shape) for shape in _shapes_of(n)])


@st.composite
def _parts(draw: Draw, n: int) -> SubMesh:
    ranks = draw(st.permutations(range(n)))
    size = draw(st.integers(1, n))
    return SubMesh(tuple(ranks[:size]), draw(st.sampled_from(_shapes_of(size))))


def _shapes_of(size: int) -> Sequence[tuple[int, ...]]:
    return [
        shape
        for axes in (1, 2, 3)
        for shape in itertools.product(range(1, size + 1), repeat=axes)
        if math.prod(shape) == size
    ]


# --- A rank that moves tensors; where DTensor has both layouts, its answer is compared as well ---

_OF_DTENSOR = (torch.float32, torch.float64, torch.int32, torch.int64)
"""The types that gloo reduces and gathers."""


class MovingRank:
    def __init__(self, post: Post) -> None:
        logging.getLogger("torch").setLevel(logging.ERROR)  # of what DTensor finds suboptimal
        self._post = post
        self._groups: dict[tuple[tuple[int, ...], ...], GroupCoordinator] = {}
        self._device_meshes: dict[tuple[int, ...], DeviceMesh] = {}
        everyone = SubMesh(tuple(range(post.n)))
        (self._world,) = self._axes(everyone)

    def run(self, move: Move, _: Fault | None) -> str:
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
    gradient = hold(move.whole * 3 + 1, of_gradient(move.source), axes)
    return gradient * share(move.source, move.source_mesh.shape)


def _dtensor_has(move: Move) -> bool:
    known = all(
        placement == Partial(ReduceOp.SUM)
        or not isinstance(placement, (Partial, Shard))
        or (isinstance(placement, Shard) and not placement.padded and placement.sizes is None)
        for placement in (*move.source.placements, *move.target.placements)
    )
    return known and not move.target.has_terms and move.dtype in _OF_DTENSOR
