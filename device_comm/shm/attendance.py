"""Which ranks of a group are there, and which have closed it; `device_comm.shm.layout` draws it.

A rank that has closed the group does nothing more in it. So whoever waits for it looks once more
for what it did before, and raises if that is not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from device_comm.shm.layout import GROUP_LEFT, RANK_PRESENT
from shm_broadcast.errors import GroupAbortedError, GroupClosedError, closed_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.shm.layout import GroupLayout
    from shm_broadcast.board.board import Board
    from shm_broadcast.segment import Segment

_PRESENT: Final = 1
_LEFT: Final = 2


class Attendance:
    """What one rank says of itself, and sees of the others.

    Attributes:
        members: the board's member number of each rank.
    """

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        rank: int,
        segment: Segment,
        layout: GroupLayout,
    ) -> None:
        """In the group's segment, which has that layout. Collective: no."""
        self.members = members
        self._board = board
        self._words = segment.words
        self._own = layout.rank_line(rank) + RANK_PRESENT
        self._lines = [layout.rank_line(each) + RANK_PRESENT for each in range(len(members))]

    def join(self) -> None:
        """Say that this rank is there."""
        self._say(_PRESENT)

    def leave(self) -> None:
        """Say that this rank does nothing more in the group."""
        self._say(_LEFT)

    def absent(self) -> list[int]:
        """The member numbers of the ranks that have not come yet."""
        return [self.members[rank] for rank in self._where(0)]

    @property
    def anyone_left(self) -> bool:
        """Whether a rank has closed the group; costs one load."""
        return self._words.load32(GROUP_LEFT) != 0

    def left(self) -> list[int]:
        """The ranks that have closed the group."""
        return self._where(_LEFT)

    def has_left(self, rank: int) -> bool:
        """Whether that rank has closed the group."""
        return self._words.load32(self._lines[rank]) == _LEFT

    def error(self, operation: str, rank: int) -> GroupClosedError:
        """The error of an operation that needs a rank that has closed the group.

        Raises:
            GroupAbortedError: the group was aborted for another reason, so that rank has closed it.
        """
        try:
            self._board.check(operation)
        except GroupAbortedError as aborted:
            if aborted.failure.kind != GroupClosedError.__name__:
                raise
        return closed_by(operation, self._board.ranks[self.members[rank]])

    def end(self, operation: str, rank: int) -> GroupClosedError:
        """As `error`, of an operation that cannot be taken back: aborts the group with it."""
        error = self.error(operation, rank)
        self._board.abort(error, self.members[rank])
        return error

    def _say(self, state: int) -> None:
        self._words.store32(self._own, state)
        if state == _LEFT:
            self._words.store32(GROUP_LEFT, 1)
        for member in self.members:
            self._board.ring(member)

    def _where(self, state: int) -> list[int]:
        return [rank for rank, at in enumerate(self._lines) if self._words.load32(at) == state]
