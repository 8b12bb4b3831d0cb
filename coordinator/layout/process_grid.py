"""Some ranks as a grid of data-parallel rows of tensor-parallel ranks: pure arithmetic.

The rank at index i of ``ranks`` is in row i // tp, at place i % tp of it: what counts is its
index, not its global number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.rank_grid import RankGrid

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """Which ranks share tensors, and which do the same; make it with `of`.

    Attributes:
        ranks: global ranks, in the order of the grid.
        tp: ranks of a row.
        dp: rows.
    """

    ranks: tuple[int, ...]
    tp: int
    dp: int

    @classmethod
    def of(cls, ranks: Sequence[int], tp: int | None = None, dp: int | None = None) -> ProcessGrid:
        """The grid of these ranks.

        Args:
            ranks: global ranks, in the order of the grid.
            tp: None: what ``dp`` leaves, or 1.
            dp: None: what ``tp`` leaves.

        Raises:
            ValueError: a rank is there twice, or ``tp * dp`` is not how many there are.
        """
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"every rank is there once; got {list(ranks)}")
        if tp is None:
            tp = 1 if dp is None else len(ranks) // dp
        if dp is None:
            dp = len(ranks) // tp
        if tp * dp != len(ranks):
            raise ValueError(f"{len(ranks)} ranks cannot make up tp={tp} times dp={dp}")
        return cls(tuple(ranks), tp, dp)

    def tp_ranks(self, rank: int) -> list[int]:
        """The global ranks of the row that ``rank`` is in."""
        return self._group(rank, "tp")

    def dp_ranks(self, rank: int) -> list[int]:
        """The global ranks, one of each row, at the place of ``rank``."""
        return self._group(rank, "dp")

    def tp_local_rank(self, rank: int) -> int:
        """The place of ``rank`` in its row."""
        return self.tp_ranks(rank).index(rank)

    def dp_local_rank(self, rank: int) -> int:
        """The row of ``rank``."""
        return self.dp_ranks(rank).index(rank)

    def _group(self, rank: int, axis: str) -> list[int]:
        grid = RankGrid.of({"dp": self.dp, "tp": self.tp})
        return [self.ranks[index] for index in grid.group_of(self.ranks.index(rank), axis)]
