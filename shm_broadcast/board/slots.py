"""What this process says in its slot of a board, and what all the slots say."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from shm_broadcast import layout
from shm_broadcast.board.history import outcome_of, read_history
from shm_broadcast.board.members import Members
from shm_broadcast.board.tallies import Tallies
from shm_broadcast.board.totals import read_totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from shm_broadcast.atomics import WordsLike
    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.outward import Outward
    from shm_broadcast.board.totals import VerbTotal
    from shm_broadcast.errors import MemberStatus
    from shm_broadcast.segment import Segment


class Slots:
    """The slots of a board, as the process sees them that has one of them, or none: see `Board`."""

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], name: str, member: int | None
    ) -> None:
        n_members = self.n_members = len(ranks)
        self._segment = segment
        self.words: WordsLike = segment.words
        self.ranks = ranks
        self.name = name
        self.member = None if member is None else self._valid(member)
        members = self._members = Members(segment, ranks, name)
        self.tallies = Tallies(
            segment, lambda each: members.elsewhere.tallies(each), member, n_members
        )
        self._slot = 0 if member is None else layout.member_slot(member)
        self._outward: Outward | None = None
        self.history = 0
        if member is not None and self.words.load32(layout.BOARD_HISTORY):
            self.history = layout.history_slot(member, n_members)

    def slot_offset(self, member: int) -> int:
        """Where ``member``'s slot begins in `words`."""
        return layout.member_slot(self._valid(member))

    def stamp(
        self,
        operation: str,
        group: str = "",
        verb: int = 0,
        size: int = 0,
        number: int = 0,
        peer: int = layout.NO_PEER,
        dtype: int = 0,
    ) -> int:
        """Say "I begin ``operation``"; returns its number among this member's operations.

        The other arguments are for the history: see `PastOperation`; verb and dtype are codes.
        """
        return self.words.stamp(
            self._slot or self._refuse("stamp"),
            layout.STATE_BUSY,
            operation,
            self.history,
            group if verb else operation,
            verb,
            size,
            number,
            peer,
            dtype,
        )

    def ended(
        self,
        sequence: int,
        error: BaseException | None = None,
        size: int = 0,
        number: int = 0,
    ) -> None:
        """Say in the history how operation ``sequence`` ended, unless that was said.

        ``size`` and ``number`` are given where they were not known when it began.
        """
        outcome = layout.OUTCOME_DONE if error is None else outcome_of(error)
        self.words.leave(self.history, sequence, outcome, size, number)

    def in_collective(self, number: int) -> None:
        """Say which collective of its group the operation is: see `MemberStatus.collective`."""
        slot = self._slot or self._refuse("in_collective")
        self.words.store64(slot + layout.MEMBER_COLLECTIVE, number)
        sequence = self.words.load64(slot + layout.MEMBER_SEQUENCE)
        self.words.store64(slot + layout.MEMBER_COLLECTIVE_AS_OF, sequence)

    def idle(self) -> None:
        """Say "I am between operations"."""
        self.words.progress(self._slot or self._refuse("idle"), layout.STATE_IDLE)

    def progress(self) -> None:
        """Note the time of progress, within whatever this member does."""
        slot = self._slot or self._refuse("progress")
        self.words.store64(slot + layout.MEMBER_PROGRESS, time.monotonic_ns())

    def add_place(self, group: str, rank: int) -> None:
        """Say that this member is ``rank`` in ``group``, for whoever looks on from outside."""
        if self._outward is not None:
            self._outward.add_place(group, rank)

    def add_group(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Say that this member is ``rank`` in a group of ``ranks``, for whoever looks on."""
        if self._outward is not None:
            self._outward.count_group(name, rank, len(ranks), ranks[0], 1)

    def close_group(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Say that this member has closed a group that `add_group` was called for."""
        if self._outward is not None:
            self._outward.count_group(name, rank, len(ranks), ranks[0], -1)

    @contextmanager
    def showing_wait(self, operation: str) -> Iterator[Callable[[Iterable[int]], None]]:
        """Inside, whoever looks on sees that this member waits in ``operation``.

        For waits that are none on the board. What this gives is called with the members that are
        waited for, again when they are others; while they are none, nothing is seen.
        """
        since, entry, outward = time.monotonic_ns(), 0, self._outward

        def say(members: Iterable[int]) -> None:
            nonlocal entry
            late = [each for each in members if each != self.member]
            if outward is None:
                return
            if late:
                entry = entry or outward.begin_wait()
            if entry and late:
                outward.say_wait(entry, operation, since, late)
            elif entry:
                ended, entry = entry, 0
                outward.end_wait(ended)

        try:
            yield say
        finally:
            say(())

    def past(self, member: int) -> tuple[PastOperation, ...]:
        """The last operations of a member on this host, about 2,000, the oldest first.

        They can be read when its process has ended, until another one takes its slot.
        """
        memory = self._segment.memory
        return read_history(
            self._segment,
            self._valid(member),
            self.n_members,
            lambda at, size: bytes(memory[at : at + size]),
        )

    def totals(self, member: int) -> tuple[VerbTotal, ...]:
        """What all operations of a member on this host came to since it joined."""
        return read_totals(self._segment, self._valid(member), self.n_members)

    def joined(self, member: int) -> bool:
        """Whether a process has taken ``member``'s slot."""
        return self._members.joined(self._valid(member))

    def runs(self, member: int, pid: int) -> bool:
        """Whether process ``pid`` has ``member``'s slot, or had it last, and has not ended."""
        return self._members.runs(self._valid(member), pid)

    def lost(self) -> list[int]:
        """The members whose process has ended without closing its board."""
        return [each for each in range(self.n_members) if self._members.state(each) == "lost"]

    def lost_slot(self, member: int) -> AbstractContextManager[None]:
        """Inside, nobody can take the slot of ``member``, whose process has ended.

        Raises:
            ValueError: it has not, or a successor is about to take the slot.
        """
        return self._members.lost_slot(self._valid(member))

    def member_status(self, member: int) -> MemberStatus:
        """What one member was last seen doing."""
        return self._members.status(self._valid(member))

    def status(self) -> list[MemberStatus]:
        """What every member was last seen doing."""
        return [self.member_status(member) for member in range(self.n_members)]

    def _titled(self, operation: str) -> str:
        return f"{self.name} {operation}" if self.name else operation

    def _refuse(self, operation: str) -> NoReturn:
        raise ValueError(f"{self._titled(operation)}: this process is no member of the group")

    def _valid(self, member: int) -> int:
        if not 0 <= member < self.n_members:
            raise ValueError(f"member must be in 0..{self.n_members - 1}; got {member}")
        return member
