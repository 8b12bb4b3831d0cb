"""The members of a board: which process has each slot, and what it does.

Guarantees: a slot is taken by one process; a second one, even at the same moment, is refused until
that process has ended or left.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from shm_broadcast import layout
from shm_broadcast.board.elsewhere import OneHost
from shm_broadcast.board.fixed_text import read_text, write_text
from shm_broadcast.errors import MemberStatus, name_of
from shm_broadcast.machine.liveness import ProcessId, ProcessWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shm_broadcast.board.elsewhere import Elsewhere
    from shm_broadcast.board.fixed_text import SharedBytes


class Members:
    """One process's view of the slots. Close it to let go of the processes it watches.

    Attributes:
        elsewhere: knows the members on other hosts.
    """

    def __init__(
        self,
        segment: SharedBytes,
        ranks: Sequence[int],
        name: str,
        runs: Callable[[ProcessId], bool] | None = None,
    ) -> None:
        """Look at the slots in ``segment``, called ``ranks`` in messages, of the group ``name``.

        ``runs`` tells whether a process still runs; None: they are watched from here.
        """
        self._segment = segment
        self._words = segment.words
        self._ranks = ranks
        self._name = name
        self.elsewhere: Elsewhere = OneHost()
        self._closed = False
        self._told = runs
        self._watches: dict[int, ProcessWatch] = {}
        self._lock = threading.RLock()

    def take(self, member: int) -> None:
        """Keep ``member``'s slot for this process; nobody sees it before `show`.

        Raises:
            ValueError: a living process has the slot.
        """
        words, slot = self._words, layout.member_slot(member)
        self._lock_slot(member)
        if self.state(member) in ("idle", "busy"):
            words.store64(slot + layout.MEMBER_JOINING, 0)
            self._refuse(member, words.load32(slot + layout.MEMBER_PID))

    def show(self, member: int) -> None:
        """Let the others see that this process has taken ``member``'s slot."""
        me, words, slot = ProcessId.current(), self._words, layout.member_slot(member)
        words.store64(slot + layout.MEMBER_START_TIME, me.start_time)
        words.store32(slot + layout.MEMBER_PID, me.pid)
        words.store64(slot + layout.MEMBER_SEQUENCE, 0)
        words.store64(slot + layout.MEMBER_COLLECTIVE, 0)
        write_text(self._segment, slot + layout.MEMBER_OPERATION, "", layout.OPERATION_BYTES)
        words.progress(slot, layout.STATE_IDLE)
        words.store64(slot + layout.MEMBER_JOINING, 0)

    def forgo(self, member: int) -> None:
        """Take back a `take` that is not shown, if there was one; who was lost before is lost."""
        slot = layout.member_slot(member)
        holder = ProcessId.from_word(self._words.load64(slot + layout.MEMBER_JOINING))
        if holder.pid == os.getpid():
            self._words.compare_and_swap32(slot + layout.MEMBER_PID, os.getpid(), 0)
            self._words.store64(slot + layout.MEMBER_JOINING, 0)

    def leave(self, member: int) -> None:
        """Say that ``member`` left in good order, unless the slot is a successor's by now."""
        slot = layout.member_slot(member)
        if self._words.load32(slot + layout.MEMBER_PID) == os.getpid():
            self._words.progress(slot, layout.STATE_CLOSED)

    def drop(self, member: int) -> None:
        """Say that ``member`` is lost, unless the slot is a successor's by now."""
        slot = layout.member_slot(member)
        if self._words.load32(slot + layout.MEMBER_PID) == os.getpid():
            self._words.store32(slot + layout.MEMBER_STATE, layout.STATE_LOST)

    @contextmanager
    def lost_slot(self, member: int) -> Iterator[None]:
        """Inside, nobody can take the slot of ``member``, which is lost.

        Raises:
            ValueError: it is not, or a successor is about to take the slot.
        """
        self._lock_slot(member)
        try:
            if self.state(member) != "lost":
                raise ValueError(f"{self.status(member)}: it is not lost")
            yield
        finally:
            self._words.store64(layout.member_slot(member) + layout.MEMBER_JOINING, 0)

    def joined(self, member: int) -> bool:
        """Whether a process has ever taken ``member``'s slot."""
        state = self._words.load32(layout.member_slot(member) + layout.MEMBER_STATE)
        return state != layout.STATE_ABSENT

    def state(self, member: int) -> str:
        """``"absent"``, ``"idle"``, ``"busy"``, ``"closed"`` or ``"lost"``."""
        code = self._words.load32(layout.member_slot(member) + layout.MEMBER_STATE)
        state = layout.STATE_NAMES[code]
        return "lost" if state in ("idle", "busy") and not self._alive(member) else state

    def runs(self, member: int, pid: int) -> bool:
        """Whether process ``pid`` has ``member``'s slot, or had it last, and has not ended."""
        slot = layout.member_slot(member)
        return self._words.load32(slot + layout.MEMBER_PID) == pid and self._alive(member)

    def first_gone(self, members: Iterable[int]) -> int | None:
        """The first one that has died or left; one that has not joined yet is not gone."""
        for member in members:
            if self.state(member) in ("lost", "closed") or self.elsewhere.gone(member):
                return member
        return None

    def status(self, member: int) -> MemberStatus:
        """What ``member`` was last seen doing, or heard to do if it is on another host."""
        heard = self.elsewhere.status(member)
        if heard is not None:
            return heard
        words, slot = self._words, layout.member_slot(member)
        stamped = words.load64(slot + layout.MEMBER_PROGRESS)
        sequence = words.load64(slot + layout.MEMBER_SEQUENCE)
        known = words.load64(slot + layout.MEMBER_COLLECTIVE_AS_OF) == sequence
        return MemberStatus(
            rank=self._ranks[member],
            pid=words.load32(slot + layout.MEMBER_PID),
            state=self.state(member),
            operation=read_text(
                self._segment, slot + layout.MEMBER_OPERATION, layout.OPERATION_BYTES
            ),
            sequence=sequence,
            age=max(time.monotonic_ns() - stamped, 0) / 1e9 if stamped else None,
            collective=words.load64(slot + layout.MEMBER_COLLECTIVE) if known else 0,
        )

    def disown(self) -> None:
        """In a forked child: the thread that has the lock is its parent's."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Watch no process any more."""
        self._closed = True
        with self._lock:
            for watch in self._watches.values():
                watch.close()
            self._watches.clear()

    def _lock_slot(self, member: int) -> None:
        words, lock = self._words, layout.member_slot(member) + layout.MEMBER_JOINING
        me = ProcessId.current().word
        if not words.compare_and_swap64(lock, 0, me):
            other = words.load64(lock)
            holder = ProcessId.from_word(other)
            died_joining = other != 0 and not holder.runs()
            if not (died_joining and words.compare_and_swap64(lock, other, me)):
                self._refuse(member, holder.pid)

    def _refuse(self, member: int, holder: int) -> NoReturn:
        raise ValueError(
            f"{name_of(self._ranks[member])} of {self._name} has joined already, as pid {holder}"
        )

    def _alive(self, member: int) -> bool:
        slot = layout.member_slot(member)
        holder = ProcessId(
            self._words.load32(slot + layout.MEMBER_PID),
            self._words.load64(slot + layout.MEMBER_START_TIME),
        )
        if self._told is not None:
            return self._told(holder)
        with self._lock:
            if self._closed:
                return holder.runs()
            watch = self._watches.get(member)
            if watch is None or watch.process != holder:
                if watch is not None:
                    watch.close()
                watch = self._watches[member] = ProcessWatch(holder)
            return watch.alive()
