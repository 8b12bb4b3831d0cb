"""Block until another process or thread notifies: in shared memory, in a poll, or for a lock.

An eventcount is two 32-bit words: a counter to sleep on (a futex) and the number of waiters. It is
correct only by the order of its steps; see the ordering rule in `shm_broadcast.layout`.
`EventCount.notify` wakes every waiter whose condition became true before the call; the caller has
stored its change before. A waiter also checks its condition again after each slice of sleep.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from typing import Final, NamedTuple

from shm_broadcast._native import Turn, Words
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError
from shm_broadcast.layout import EVENTCOUNT_WAITERS
from shm_broadcast.process import system_call


class WakeFd:
    """An eventfd that is readable from `notify` until `clear`.

    It takes no lock: a signal handler may call `notify` or `close` in the middle of a `notify` that
    it interrupts. The descriptor is never written to once another file may have its number.
    """

    def __init__(self) -> None:
        with system_call("eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._release = weakref.finalize(self, os.close, self._fd)
        self._release.atexit = False  # threads may notify until the process exits
        self._closed = False
        self._notifying: list[None] = []

    def fileno(self) -> int:
        """Return the descriptor, after `close` as well."""
        return self._fd

    def notify(self) -> None:
        """Make the descriptor readable; does nothing after `close`."""
        self._notifying.append(None)  # first: `close` sets `_closed` and reads this afterwards
        try:
            if not self._closed:
                os.eventfd_write(self._fd, 1)
        finally:
            self._notifying.pop()
            self._release_unused()

    def clear(self) -> None:
        """Reset the descriptor; for the thread that polls."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor once no thread is in `notify`; idempotent."""
        self._closed = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._closed and not self._notifying:
            self._release()


SLICE_SECONDS: Final = 0.04
"""The longest sleep of a waiter between checks of its condition, abort and lost peers."""

LONG_SLICE_SECONDS: Final = 0.16
"""The same after `SHORT_SLICES` slices: a check takes 100 µs of a core, 25 times a second."""

SHORT_SLICES: Final = 25

DEFAULT_SPIN_SECONDS: Final = 200e-6
"""How long a waiter spins before it sleeps.

Sleeping and waking cost 35 µs, in a virtual machine up to 100. If two peers both sleep, each
message pays for both, so each waits long enough to sleep again. Spinning for about twice that time
breaks this cycle.
"""


LEAST_SPIN_SECONDS: Final = 20e-6
"""How long to spin, yielding the core, even if that does not help the waiter.

A process that was woken may share the core with the process that woke it and waits for its answer.
Going to sleep takes 100 µs with cold caches, and the answer would wait for that.
"""

_LONGEST_SPIN: Final = 1e9
"""Seconds whose nanoseconds fit 64 bits."""

LOOKOUT_SHARE: Final = 0.05
"""The waiter spins for this share of a regular wait before and after its expected end.

That costs about the same share of a core.
"""

_ENOUGH_ALIKE: Final = 3
"""How many similar waits count as regular."""

_SHORTEST_RHYTHM: Final = 0.001
_LONGEST_RHYTHM: Final = 0.1
"""Seconds. A timer is too coarse for shorter waits; rare events need not be fast."""


_LOOK_SECONDS: Final = 0.001
"""The longest `Lookout.look` before the other conditions of the wait are checked again."""


class Lookout(NamedTuple):
    """The time when a waiter spins because the event is expected.

    Attributes:
        at: its begin, in seconds of ``time.monotonic()``.
        look: spins for the given seconds, without the GIL, until the event; returns whether it
            occurred. If it returns False early, the caller must release the GIL.
    """

    at: float
    seconds: float
    look: Callable[[float], bool]

    def look_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Spin in its time until ``ready()``; return whether it is."""
        end = min(self.at + self.seconds, deadline.at)
        while not ready():
            now = time.monotonic()
            if now >= end:
                return False
            until = min(now + _LOOK_SECONDS, end)
            if not self.look(until - now) and time.monotonic() < until:
                time.sleep(0)  # takes 50 us and more before Python 3.13
        return True


class EventCount:
    """The eventcount of one waiter, at ``offset`` of ``words``."""

    def __init__(self, words: Words, offset: int) -> None:
        self._words = words
        self.offset = offset

    def notify(self) -> None:
        """Wake all waiters. Costs one fence and one load if there are none."""
        self._words.ring(self.offset)

    def reset_waiters(self) -> None:
        """Drop waiters whose process was killed; only for a process that takes over the slot."""
        self._words.store32(self.offset + EVENTCOUNT_WAITERS, 0)

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        *,
        slice_seconds: float | None = None,
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        lookout: Lookout | None = None,
        between_slices: Callable[[], None],
    ) -> bool:
        """Wait until ``ready()``; return False if the deadline passes first.

        Args:
            ready: the condition; cheap, called many times.
            slice_seconds: the longest sleep between calls of ``ready``; None: `SLICE_SECONDS`,
                later `LONG_SLICE_SECONDS`.
            spin_seconds: how long to spin before the first sleep, and again after each `notify`.
            lookout: when to spin once more, without the GIL.
            between_slices: called before every sleep; its exceptions end the wait.
        """

        def wait_until(end: Deadline) -> bool:
            while not _spin(ready, end.remaining(spin_seconds)):
                ended = self._sleep(ready, end, slice_seconds, between_slices)
                if ended is not None:
                    return ended
            return True

        if lookout is not None and lookout.at < deadline.at:
            if wait_until(Deadline(lookout.at, None)):
                return True
            if lookout.look_until(ready, deadline):
                return True
        return wait_until(deadline)

    def _sleep(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        slice_seconds: float | None,
        between_slices: Callable[[], None],
    ) -> bool | None:
        """Sleep in slices; return True if ``ready()``, False at the deadline, None after `notify`.

        After `notify` the waiter no longer counts as one while it spins: `notify` costs a system
        call as long as there are waiters.
        """
        words, waiters = self._words, self.offset + EVENTCOUNT_WAITERS
        if slice_seconds is None:
            slices = chain(repeat(SLICE_SECONDS, SHORT_SLICES), repeat(LONG_SLICE_SECONDS))
        else:
            slices = chain(repeat(slice_seconds))
        words.add32(waiters, 1)
        try:
            while True:
                # The counter first, then the condition: a `notify` in between changes the counter,
                # and `sleep_on` returns at once.
                seen = words.load32(self.offset)
                if ready():
                    return True
                between_slices()
                if deadline.expired:
                    return False
                words.sleep_on(self.offset, seen, deadline.remaining(next(slices)))
                if words.load32(self.offset) != seen:
                    return None
        finally:
            words.add32(waiters, -1)


class AdaptiveSpin:
    """The spin time before a sleep, and the next `Lookout`, learnt from the last waits.

    A wait that ended within twice the full window restores it; each longer one halves it, down to
    `LEAST_SPIN_SECONDS`, so that long waits do not burn a core. Waits of similar length, as between
    the steps of a model, are expected to recur: the waiter wakes up early, so that the message
    finds a running, warm thread.
    """

    def __init__(self, spin_seconds: float = DEFAULT_SPIN_SECONDS) -> None:
        if not 0 <= spin_seconds <= _LONGEST_SPIN:
            raise ValueError(f"spin_seconds must be 0 to {_LONGEST_SPIN:g}; got {spin_seconds}")
        self._largest = int(spin_seconds * 1e9)
        self._least = int(min(LEAST_SPIN_SECONDS, spin_seconds) * 1e9)
        self.window_ns = self._largest
        self._usual_ns = 0
        self._alike = 0

    def observe(self, waited_ns: int) -> None:
        """Learn from a wait that has ended."""
        if waited_ns <= 2 * self._largest:
            self.window_ns = self._largest
        else:
            self.window_ns = max(self.window_ns // 2, self._least)
        off = waited_ns - self._usual_ns
        if abs(off) <= self._usual_ns * LOOKOUT_SHARE:
            self._usual_ns += off // 4
            self._alike = min(self._alike + 1, 2 * _ENOUGH_ALIKE)
        else:
            self._alike -= 2  # a single different wait keeps the usual one
            if self._alike <= 0:
                self._usual_ns, self._alike = waited_ns, 0

    def lookout(self, since_ns: int, look: Callable[[float], bool]) -> Lookout | None:
        """Return the lookout of a wait since ``since_ns``; None if waits are not regular."""
        usual = self._usual_ns * 1e-9
        if self._alike < _ENOUGH_ALIKE or not _SHORTEST_RHYTHM <= usual <= _LONGEST_RHYTHM:
            return None
        lead = usual * LOOKOUT_SHARE
        return Lookout(since_ns * 1e-9 + usual - lead, 2 * lead, look)


def _spin(ready: Callable[[], bool], seconds: float) -> bool:
    if ready():
        return True
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.sched_yield()
        if ready():
            return True
    return False


class TimedLock:
    """A lock whose `acquire` honours a deadline and the group's abort.

    Usage, in one block that ends by releasing the lock if this thread holds it::

        with lock.owner_lock as acquired:
            if not acquired:
                lock.acquire(deadline, operation, check)
            ...

    A thread that already holds the lock gets RuntimeError: a signal handler, or code that runs
    while a message is encoded, would wait for its own thread.
    """

    def __init__(self) -> None:
        self.owner_lock = Turn()

    def acquire(self, deadline: Deadline, operation: str, check: Callable[[str], None]) -> None:
        """Wait for the lock, inside ``with lock.owner_lock``.

        ``check`` is called with ``operation`` every `SLICE_SECONDS`; its exceptions end the wait.
        Raises GroupTimeoutError if another thread held the lock until the deadline.
        """
        while not self.owner_lock.take_within(deadline.remaining(SLICE_SECONDS)):
            check(operation)
            if deadline.expired:
                raise GroupTimeoutError(
                    operation, deadline.timeout, detail="another thread of this process is in it"
                )
