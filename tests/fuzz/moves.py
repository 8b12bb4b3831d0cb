"""What a random change of layout is, and Hypothesis strategies for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from coordinator.layout import Layout, SubMesh
from device_comm import ReduceOp
from tests.coordinator.layout.by_hand import layouts
from tests.device_comm.oracle import MOVED, ops_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import SearchStrategy

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
    """One tensor that goes from one layout to another.

    Attributes:
        way: of `WAYS`: along the axes of one mesh, from mesh to mesh, or by a checkpoint.
        shape: of the whole tensor.
        dtype: of the tensor.
        memory: how the parts lie in memory.
        source_mesh: the ranks that hold it.
        source: how they do.
        target_mesh: the ranks that get it.
        target: how they do.
        gradient: whether its gradient goes back.
    """

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
    """Moves among ``n`` ranks."""
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
    """All ranks in their order, in one to three axes."""
    everyone = tuple(range(n))
    return st.sampled_from([SubMesh(everyone, shape) for shape in _shapes_of(n)])


@st.composite
def _parts(draw: Draw, n: int) -> SubMesh:
    """Some ranks in any order."""
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
