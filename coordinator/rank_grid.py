"""The arithmetic of a grid of ranks with named axes: which ranks form which group.

The last axis varies fastest. The grid of `coordinator.init(dp=2, pp=2, tp=2)`, whose axes are (dp,
pp, tp), is

                  dp 0                     dp 1
             tp 0     tp 1            tp 0     tp 1
           ┌────────┬────────┐      ┌────────┬────────┐
    pp 0   │ rank 0 │ rank 1 │      │ rank 4 │ rank 5 │
           ├────────┼────────┤      ├────────┼────────┤
    pp 1   │ rank 2 │ rank 3 │      │ rank 6 │ rank 7 │
           └────────┴────────┘      └────────┴────────┘

    rank = (dp_rank * pp + pp_rank) * tp + tp_rank

A group along some axes holds the ranks that differ on these axes only, in rank order:

    groups("tp")          [0 1] [2 3] [4 5] [6 7]       a row of the picture
    groups("pp")          [0 2] [1 3] [4 6] [5 7]       a column
    groups("dp")          [0 4] [1 5] [2 6] [3 7]       the same cell of every block
    groups("dp", "tp")    [0 1 4 5] [2 3 6 7]           experts: all cells of a stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shm_broadcast.arguments import integer, printable_text

MODEL_AXES: Final = ("dp", "pp", "pcp", "tp")
"""The axes that every job has, outermost first."""

_OWN_GROUPS: Final = ("world", *MODEL_AXES, "dcp", "ep")
"""The names of the built-in groups; own axes must have other names."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A grid of ranks with named axes, outermost first.

    Attributes:
        axes: (name, size) of each axis; the last one varies fastest.

    Raises:
        ValueError: a size is below 1, a name is empty, or two axes have the same name.
        TypeError: a size is not an integer, or a name is not a string.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        axes = tuple(
            (printable_text("the name of an axis", name), size) for name, size in self.axes
        )
        names = tuple(name for name, _ in axes)
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(f"the axes of a grid need names, each a different one; got {names}")
        object.__setattr__(self, "axes", tuple((name, integer(name, size)) for name, size in axes))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> RankGrid:
        """Return the grid of these axes, outermost first: ``RankGrid.of({"pp": 2, "tp": 4})``."""
        return cls(tuple(sizes.items()))

    @classmethod
    def of_job(
        cls, *, tp: int, pp: int, dp: int, pcp: int, axes: Mapping[str, int] | None
    ) -> RankGrid:
        """Return the grid of a job: the caller's own axes, outermost first, then dp, pp, pcp and
        tp.

        Raises:
            ValueError: a size is below 1, or an axis has no name or the name of a built-in group.
            TypeError: a size is not an integer, or ``axes`` is not a mapping.
        """
        if axes is not None and not isinstance(axes, Mapping):
            raise TypeError(f"axes must be a mapping of sizes by name; got {axes!r}")
        own = dict(axes or {})
        if taken := [name for name in own if name in _OWN_GROUPS]:
            raise ValueError(f"axes named {taken}: built-in groups have these names; choose others")
        return cls.of({**own, "dp": dp, "pp": pp, "pcp": pcp, "tp": tp})

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(name for name, _ in self.axes)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by name, outermost first."""
        return dict(self.axes)

    @property
    def own_axes(self) -> dict[str, int]:
        """The caller's own axes with their sizes."""
        return {name: size for name, size in self.axes if name not in MODEL_AXES}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis, by name; raise ValueError outside the grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a grid of {self.size} ranks")
        positions = {}
        for name, size in reversed(self.axes):
            rank, positions[name] = divmod(rank, size)
        return {name: positions[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at a position, which has all axes and no others.

        Raises:
            ValueError: an axis is missing or unknown, or a position is outside its axis.
        """
        if coordinates.keys() != set(self.names):
            raise ValueError(f"need a position on each of {self.names}; got {list(coordinates)}")
        rank = 0
        for name, size in self.axes:
            position = coordinates[name]
            if not 0 <= position < size:
                raise ValueError(f"axis {name!r} has positions 0 to {size - 1}; got {position}")
            rank = rank * size + position
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups along ``axes``, named in any order; without axes each rank is a group.

        Returns:
            The groups in the order of their first ranks; ranks ascend within a group.

        Raises:
            ValueError: an axis is unknown.
        """
        groups = (self.group_of(rank, *axes) for rank in range(self.size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks of the group along ``axes`` that contains ``rank``, ascending.

        Raises:
            ValueError: ``rank`` is not in the grid, or an axis is unknown.
        """
        self._require(axes)
        coordinates = self.coordinates(rank)
        ranks = [0]
        for name, size in self.axes:
            positions = range(size) if name in axes else (coordinates[name],)
            ranks = [each * size + position for each in ranks for position in positions]
        return ranks

    def dcp_group_of(self, rank: int, dcp: int) -> list[int]:
        """Return the ranks that share contexts with ``rank`` (decode context parallel).

        The group along tp and pcp, counted with pcp fastest, is cut into runs of ``dcp`` ranks. The
        result is the run that contains ``rank``, in counting order.

        Raises:
            ValueError: ``rank`` is not in the grid, or ``dcp`` does not divide tp x pcp.
            TypeError: ``dcp`` is not an integer.
        """
        coordinates, tp, pcp = self.coordinates(rank), self.sizes["tp"], self.sizes["pcp"]
        if tp * pcp % integer("dcp", dcp):
            raise ValueError(f"dcp={dcp} does not divide tp={tp} x pcp={pcp}")
        counted = [
            self.rank({**coordinates, "tp": t, "pcp": p}) for t in range(tp) for p in range(pcp)
        ]
        begin = counted.index(rank) // dcp * dcp
        return counted[begin : begin + dcp]

    def _require(self, axes: tuple[str, ...]) -> None:
        unknown = set(axes) - set(self.names)
        if unknown:
            raise ValueError(f"no axis {sorted(unknown)}; this grid has {self.names}")
