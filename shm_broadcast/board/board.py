"""The board: who is in the group, what each member does, and whether the group was aborted.

One segment per group and host, with a slot per member. It turns a hang into a sentence:
"all_reduce: timed out after 2 s, waiting for rank 3 (pid 4242), last seen in send_tensor_dict
#1040, 2.1 s ago".

Guarantees
- `Board.abort` is seen by every member, at its next operation or, asleep, at once.
- Of several failures the one that claimed the abort word first is reported to all.
- Every wait ends: see `shm_broadcast.board.waiting`.

Assumes: members share a host and a user. A board is the scope of an abort: whatever shares the
board aborts together. Members may be on other hosts if somebody carries news between the boards:
see `Board.hear`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Final, Self

import msgspec

from shm_broadcast import layout
from shm_broadcast.board.failures import forget_failure, kind_and_message, report_failure
from shm_broadcast.board.fixed_text import write_text
from shm_broadcast.board.outward import Outward
from shm_broadcast.board.stacks import write_stacks_when_asked
from shm_broadcast.board.totals import forget_totals
from shm_broadcast.board.waiting import Waiter
from shm_broadcast.errors import PeerLostError
from shm_broadcast.machine.forked_child import DISOWNED, disown_in_children
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence


_U32: Final = 0xFFFFFFFF
_log = logging.getLogger(__name__)


class BoardHandle(msgspec.Struct, frozen=True):
    """Names a board to other processes of the same user on the same host.

    Attributes:
        segment: its segment.
        ranks: what each member is called in messages.
        name: the group's name, for messages.
    """

    segment: SegmentHandle
    ranks: tuple[int, ...]
    name: str


class Board(Waiter):
    """One process's view of its group's board. Close it to leave the group in good order.

    Attributes:
        name: the group's name, for messages.
        ranks: what each member is called in messages.
        n_members: how many slots the board has.
        member: this process's slot, ``None`` for one that only looks on.
        words: the board's atomic words, for the protocols that build on it.
        history: where this member's history lies in them; 0: none is kept.
        tallies: what the members' collectives have come to, in groups that compare it.
    """

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], name: str, member: int | None
    ) -> None:
        """Use `create` and `attach`."""
        super().__init__(segment, ranks, name, member)
        self._reporting = threading.RLock()
        self._given_back = False
        if member is not None:
            self._join(member)
            disown_in_children(self)

    @classmethod
    def create(
        cls,
        n_members: int,
        member: int | None = 0,
        name: str = "group",
        ranks: Sequence[int] | None = None,
        *,
        histories: bool = True,
    ) -> Board:
        """A new board with ``n_members`` slots; this process owns the memory.

        Collective: no. The others attach by `handle`.

        Args:
            n_members: 1 or more.
            member: the slot this process takes; ``None`` to take none.
            name: goes before each operation in messages; ``""`` where that says it all.
            ranks: what each member is called in messages, `DRIVER_RANK` for one that has no rank;
                its number if not given.
            histories: whether to keep the last operations of each member, and what all of them came
                to, in 139 KiB each.

        Raises:
            ValueError: ``n_members`` or ``member`` is out of range, or ``ranks`` are not as many.
            SharedMemoryError: too little memory is free.
        """
        if n_members < 1:
            raise ValueError(f"a board needs 1 or more members; got {n_members}")
        called = tuple(range(n_members) if ranks is None else ranks)
        if len(called) != n_members:
            raise ValueError(f"{n_members} members cannot be called {called}")
        size = layout.board_size(n_members, histories=histories)
        segment = Segment.create(size, layout.BOARD_LABEL)
        if histories:
            segment.words.store32(layout.BOARD_HISTORY, layout.HISTORY_ENTRIES)
        segment.words.write(layout.BOARD_KEY, os.urandom(layout.BOARD_KEY_BYTES))
        write_text(segment, layout.BOARD_NAME, name, layout.BOARD_NAME_BYTES)
        for index, rank in enumerate(called):
            segment.words.store32(layout.member_slot(index) + layout.MEMBER_RANK, rank & _U32)
        # Last: whoever looks on takes it for a sign that all of the above is there.
        segment.words.store32(layout.BOARD_MEMBERS, n_members)
        return cls(segment, called, name, member)

    @classmethod
    def attach(cls, handle: BoardHandle, member: int | None) -> Board:
        """Join the board that ``handle`` names, as ``member``.

        Collective: no. A slot whose process has died may be taken over.

        Raises:
            SharedMemoryError: the board is on another host, or its owner has ended.
            ValueError: ``member`` is out of range, or taken by a living process.
        """
        return cls(Segment.attach(handle.segment), handle.ranks, handle.name, member)

    def handle(self) -> BoardHandle:
        """What `attach` needs; valid while this process keeps the board open."""
        return BoardHandle(self._segment.handle(), self.ranks, self.name)

    @property
    def memory(self) -> memoryview:
        """The board's bytes, for extensions that wait and stamp by themselves."""
        return self._segment.memory

    @property
    def key(self) -> bytes:
        """Random bytes that only those know who have attached this board."""
        begin = layout.BOARD_KEY
        return bytes(self._segment.memory[begin : begin + layout.BOARD_KEY_BYTES])

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """End every member's waiting with `GroupAbortedError`; the first failure is kept.

        Collective: no, any member may.

        Args:
            error: what happened.
            culprit: the member it happened to; if not given, the lost one that ``error`` names, or
                else this one.
        """
        member = self._require_member("abort")
        about = self._lost_by(error, member) if culprit is None else culprit
        first = self.aborted is None
        self.report(member, *kind_and_message(error), about)
        if first and self.aborted is not None:
            who = {"rank": self.ranks[about], "group": self.name}
            _log.info("%s was aborted: %s", self.name or "the group", self.aborted, extra=who)
        self.catch_up()  # other hosts are told before this call does anything else

    def report(self, member: int, kind: str, message: str, culprit: int) -> None:
        """Abort with what ``member`` has reported, on this host or on another one."""
        with self._reporting:  # no other thread shows a report that is written just now
            report_failure(self._segment, self.n_members, member, kind, message, culprit)
        self.ring_all()

    def leave(self) -> None:
        """Leave the group in good order; what stands on the board can be read until `close`.

        Waiting threads of this process get GroupClosedError.
        """
        if not self._closed:
            self._closed = True
            self._mark_closed()
            self.ring_all()

    def drop(self) -> None:
        """Be lost to the others, as if this process had ended, unless the group was left before."""
        if not self._closed and self.member is not None:
            self._closed = True
            self._members.drop(self.member)
            self.ring_all()

    def disown(self) -> None:
        """In a forked child: it is no member, whoever its parent is."""
        self._closed, self._why_closed = True, DISOWNED
        self._reporting = threading.RLock()  # another thread of the parent may have it
        self._members.disown()

    def close(self) -> None:
        """Leave the group, if that was not done, and give the memory back."""
        if not self._given_back:
            self._given_back = True
            self.leave()
            self._members.close()
            self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Board({self.name!r}, member={self.member} of {self.n_members}{state})"

    def _join(self, member: int) -> None:
        try:
            self._members.take(member)
            self._doorbells[member].reset_sleepers()
            forget_failure(self._segment, self.n_members, member)
            forget_totals(self._segment, member, self.n_members)
            self.tallies.forget(member)
            self._outward = Outward(self._segment, member, self.n_members)
            stacks = write_stacks_when_asked()
            if stacks is not None:
                self._outward.say_stacks(stacks)
            self._members.show(member)
        except ValueError:  # another one has it
            raise
        except BaseException:
            self._members.forgo(member)
            raise
        self.ring_all()

    def _lost_by(self, error: BaseException | str, otherwise: int) -> int:
        if isinstance(error, PeerLostError):
            for status in self.status():
                if (status.rank, status.pid) == (error.rank, error.pid):
                    return self.ranks.index(status.rank)
        return otherwise
