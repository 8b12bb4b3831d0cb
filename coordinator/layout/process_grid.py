"""A grid of ranks: data-parallel rows of tensor-parallel ranks. Pure arithmetic.

``ranks[i]`` is in row i // tp, at position i % tp: its index counts, not its global rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.rank_grid import RankGrid

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """The grid; make it with `of`.

    Attributes:
        ranks: global ranks, row by row.
        tp: the number of ranks in a row.
        dp: the number of rows.
    """

    ranks: tuple[int, ...]
    tp: int
    dp: int

    @classmethod
    def of(cls, ranks: Sequence[int], tp: int | None = None, dp: int | None = None) -> ProcessGrid:
        """The grid of these ranks.

        Args:
            ranks: global ranks, row by row.
            tp: the number of ranks in a row; None: the number of ranks divided by ``dp``, or 1.
            dp: the number of rows; None: the number of ranks divided by ``tp``.

        Raises:
            ValueError: a rank occurs twice, ``tp`` or ``dp`` is below 1, or ``tp * dp`` is not the
                number of ranks.
        """
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"every rank is there once; got {list(ranks)}")
        if any(size is not None and size < 1 for size in (tp, dp)):
            raise ValueError(f"tp and dp are 1 or more; got tp={tp}, dp={dp}")
        if tp is None:
            tp = 1 if dp is None else len(ranks) // dp
        if dp is None:
            dp = len(ranks) // tp
        if tp * dp != len(ranks):
            raise ValueError(f"{len(ranks)} ranks cannot make up tp={tp} times dp={dp}")
        return cls(tuple(ranks), tp, dp)

    def tp_ranks(self, rank: int) -> list[int]:
        """The global ranks of the row that contains ``rank``."""
        return self._group(rank, "tp")

    def dp_ranks(self, rank: int) -> list[int]:
        """The global ranks, one of each row, at the same position as ``rank``."""
        return self._group(rank, "dp")

    def tp_local_rank(self, rank: int) -> int:
        """The position of ``rank`` in its row."""
        return self.tp_ranks(rank).index(rank)

    def dp_local_rank(self, rank: int) -> int:
        """The number of the row that contains ``rank``."""
        return self.dp_ranks(rank).index(rank)

    def _group(self, rank: int, axis: str) -> list[int]:
        grid = RankGrid.of({"dp": self.dp, "tp": self.tp})
        return [self.ranks[index] for index in grid.group_of(self.ranks.index(rank), axis)]
