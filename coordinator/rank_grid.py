"""The arithmetic of a grid of ranks with named axes: which ranks form which group.

A grid numbers its ranks row by row: the last axis varies fastest. The grid of
`coordinator.init(dp=2, pp=2, tp=2)`, whose axes are (dp, pp, tp), is

                  dp 0                     dp 1
             tp 0     tp 1            tp 0     tp 1
           ┌────────┬────────┐      ┌────────┬────────┐
    pp 0   │ rank 0 │ rank 1 │      │ rank 4 │ rank 5 │
           ├────────┼────────┤      ├────────┼────────┤
    pp 1   │ rank 2 │ rank 3 │      │ rank 6 │ rank 7 │
           └────────┴────────┘      └────────┴────────┘

    rank = (dp_rank * pp + pp_rank) * tp + tp_rank

The groups along an axis hold the ranks that differ in that axis only. Along several axes
at once they hold the ranks that differ in these axes only, in rank order:

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
"""The groups that every job has: other axes have other names."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A grid of ranks with named axes, outermost first.

    Attributes:
        axes: (name, size) of each axis; the last one varies fastest.

    Raises:
        ValueError: an axis has a size below 1 or no name, or two have the same name.
        TypeError: a size is not a whole number, or a name no text.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Check the axes."""
        axes = tuple(
            (printable_text("the name of an axis", name), size) for name, size in self.axes
        )
        names = tuple(name for name, _ in axes)
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(f"the axes of a grid need names, each a different one; got {names}")
        object.__setattr__(self, "axes", tuple((name, integer(name, size)) for name, size in axes))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> RankGrid:
        """The grid of these axes, outermost first: ``RankGrid.of({"pp": 2, "tp": 4})``."""
        return cls(tuple(sizes.items()))

    @classmethod
    def of_job(
        cls, *, tp: int, pp: int, dp: int, pcp: int, axes: Mapping[str, int] | None
    ) -> RankGrid:
        """The grid of all ranks of a job: the caller's own axes, replicas, and those of a replica.

        Args:
            tp: the number of ranks that share each layer.
            pp: the number of pipeline stages.
            dp: the number of replicas.
            pcp: the number of ranks that share a prompt.
            axes: the caller's own axes, outermost first.

        Raises:
            ValueError: a size is below 1, or an axis has no name or that of a group of each job.
            TypeError: a size is not a whole number, or ``axes`` no mapping.
        """
        if axes is not None and not isinstance(axes, Mapping):
            raise TypeError(f"axes must be a mapping of sizes by name; got {axes!r}")
        own = dict(axes or {})
        if taken := [name for name in own if name in _OWN_GROUPS]:
            raise ValueError(f"groups named {taken} are there anyway: name your axes otherwise")
        return cls.of({**own, "dp": dp, "pp": pp, "pcp": pcp, "tp": tp})

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(name for name, _ in self.axes)

    def __str__(self) -> str:
        """The axes with their sizes: ``dp=1 x pp=2 x tp=4``."""
        return " x ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by its name, outermost first."""
        return dict(self.axes)

    @property
    def own_axes(self) -> dict[str, int]:
        """The axes that not every job has, with their sizes."""
        return {name: size for name, size in self.axes if name not in MODEL_AXES}

    @property
    def size(self) -> int:
        """How many ranks the grid has."""
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on each axis, by the axis's name.

        Raises:
            ValueError: ``rank`` is not in the grid.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a grid of {self.size} ranks")
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position.

        Args:
            coordinates: the position on each axis, for all axes and no others.

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
        """All groups along ``axes``: every rank is in exactly one of them.

        Args:
            axes: names of axes, in any order. Without any, every rank is a group of its own.

        Returns:
            The groups in the order of their first ranks; the ranks of each ascend.

        Raises:
            ValueError: no such axis.
        """
        groups = (self.group_of(rank, *axes) for rank in range(self.size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The ranks of the group along ``axes`` that contains ``rank``, ascending.

        Other groups are not computed.

        Raises:
            ValueError: ``rank`` is not in the grid, or no such axis.
        """
        self._require(axes)
        at = self.coordinates(rank)
        ranks = [0]
        for name, size in self.axes:
            positions = range(size) if name in axes else (at[name],)
            ranks = [each * size + position for each in ranks for position in positions]
        return ranks

    def dcp_group_of(self, rank: int, dcp: int) -> list[int]:
        """The ranks that share contexts with ``rank`` (decode context parallel).

        The group along tp and pcp, counted with pcp fastest, is cut into runs of ``dcp`` ranks.

        Args:
            rank: a rank of the grid, which has axes tp and pcp.
            dcp: the number of ranks that share contexts.

        Returns:
            The run that contains ``rank``, in the order in which it was counted.

        Raises:
            ValueError: ``rank`` is not in the grid, or ``dcp`` does not divide tp x pcp.
            TypeError: ``dcp`` is not a whole number.
        """
        at, tp, pcp = self.coordinates(rank), self.sizes["tp"], self.sizes["pcp"]
        if tp * pcp % integer("dcp", dcp):
            raise ValueError(f"dcp={dcp} does not divide tp={tp} x pcp={pcp}")
        counted = [self.rank({**at, "tp": t, "pcp": p}) for t in range(tp) for p in range(pcp)]
        begin = counted.index(rank) // dcp * dcp
        return counted[begin : begin + dcp]

    def _require(self, axes: tuple[str, ...]) -> None:
        unknown = set(axes) - set(self.names)
        if unknown:
            raise ValueError(f"no axis {sorted(unknown)}; this grid has {self.names}")
