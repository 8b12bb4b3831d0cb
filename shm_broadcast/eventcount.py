"""Sleep until another process or thread wakes this one: in shared memory, in a poll, for a lock.

A doorbell is two 32-bit words: a counter to sleep on (a futex) and the number of announced
sleepers. It is correct only by the order of its steps; see the ordering rule in
`shm_broadcast.layout`.

Guarantees: `EventCount.notify` wakes every waiter whose condition became true before the call.
Even if a wake-up were lost, the waiter would check again after its slice of sleep.

Assumes: the caller of `EventCount.notify` has stored its change before.

Each use is one block, which takes the turn at once or waits for it::

    with lock.turn as mine:
        if not mine:
            lock.take(deadline, operation, check)
        ...

At its end the block releases the turn if its thread has it. A thread that already has the turn gets
RuntimeError: a signal handler, or code that runs while a message is encoded, would wait for itself.
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
    """Readable from `notify` until `clear`. Close it.

    It takes no lock: a signal handler may ring or close it in the middle of a `notify` that it
    interrupts, and its descriptor is never written to once it could be another file's.
    """

    def __init__(self) -> None:
        with system_call("eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._release = weakref.finalize(self, os.close, self._fd)
        self._release.atexit = False  # threads may ring until the process has gone
        self._closed = False
        self._notifying: list[None] = []

    def fileno(self) -> int:
        """The descriptor, the same number also after `close`."""
        return self._fd

    def notify(self) -> None:
        """Wake whoever polls, or will; does nothing after `close`."""
        self._notifying.append(None)  # first: `close` sets `_closed` and looks at this afterwards
        try:
            if not self._closed:
                os.eventfd_write(self._fd, 1)
        finally:
            self._notifying.pop()
            self._release_unused()

    def clear(self) -> None:
        """Stop being readable; for the thread that polls."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor, once nobody is in `notify`; idempotent."""
        self._closed = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._closed and not self._notifying:
            self._release()


SLICE_SECONDS: Final = 0.04
"""How long a waiter sleeps at most before it checks again: its condition, abort, lost peers."""

LONG_SLICE_SECONDS: Final = 0.16
"""The same for a waiter that has slept for `SHORT_SLICES` slices. A check takes 100 µs of a core
that was doing other work, which an idle reader would pay for 25 times a second."""

SHORT_SLICES: Final = 25

DEFAULT_SPIN_SECONDS: Final = 200e-6
"""How long a waiter spins before it sleeps.

Sleeping and waking cost 35 µs, in a virtual machine up to 100. If two peers both sleep, each
message pays for both, so each waits long enough to sleep again. Spinning for about twice that time
breaks this cycle.
"""


LEAST_SPIN_SECONDS: Final = 20e-6
"""How long to spin even if that does not help the waiter: it yields its core in between.

A process that was woken may run on the core of the one that woke it, which waits for its answer.
Going to sleep takes 100 µs if the code is not in the caches; until then the answer would wait, too.
"""

_LONGEST_SPIN: Final = 1e9
"""Seconds whose nanoseconds fit 64 bits."""

LOOKOUT_SHARE: Final = 0.05
"""Where waits are regular, the waiter spins around the expected moment: for this share of the wait
before it, and for the same after it. That costs about the same share of a core."""

_ENOUGH_ALIKE: Final = 3
"""How many similar waits make a rhythm."""

_SHORTEST_RHYTHM: Final = 0.001
_LONGEST_RHYTHM: Final = 0.1
"""Shorter and longer waits, in seconds, are not anticipated: a timer is too coarse for
shorter ones, and what happens rarely need not be fast."""


_LOOK_SECONDS: Final = 0.001
"""How long a look may last before the other conditions of the wait are checked again."""


class Lookout(NamedTuple):
    """When to be awake, because the awaited event is expected then.

    Attributes:
        at: from when on, in seconds of ``time.monotonic()``.
        seconds: for how long.
        look: spins for the given seconds, without the GIL, until the event has come; returns
            whether it has. If it returns earlier without it, the GIL is released for a moment.
    """

    at: float
    seconds: float
    look: Callable[[float], bool]

    def look_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Look, in its time, until ``ready()``; whether it is."""
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
    """The doorbell of one waiter, at ``offset`` of ``words``."""

    def __init__(self, words: Words, offset: int) -> None:
        self._words = words
        self.offset = offset

    def notify(self) -> None:
        """Wake all that sleep on it. Costs one fence and one load if nobody does."""
        self._words.ring(self.offset)

    def reset_waiters(self) -> None:
        """Forget sleepers whose process was killed. Only for a process that takes over the slot."""
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
        """Wait until ``ready()``; False if the deadline passes first.

        Args:
            ready: the condition; cheap, called many times.
            deadline: when to give up.
            slice_seconds: how long to sleep at most before ``ready`` is called again; None:
                `SLICE_SECONDS`, later `LONG_SLICE_SECONDS`.
            spin_seconds: how long to spin before the first sleep, and again after each ring.
            lookout: when to spin once more, other threads of this process running meanwhile.
            between_slices: called before every sleep; what it raises ends the wait.
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
        """Sleep, in slices. Returns True if ``ready()``, False at the deadline, None once it rang.

        After a ring the waiter takes itself off the sleepers before it spins again: as long as
        there are sleepers, every ring costs the ringer a system call.
        """
        words, sleepers = self._words, self.offset + EVENTCOUNT_WAITERS
        if slice_seconds is None:
            slices = chain(repeat(SLICE_SECONDS, SHORT_SLICES), repeat(LONG_SLICE_SECONDS))
        else:
            slices = chain(repeat(slice_seconds))
        words.add32(sleepers, 1)
        try:
            while True:
                # The counter first, then the condition: a ring in between changes the counter, and
                # `sleep_on` returns at once.
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
            words.add32(sleepers, -1)


class AdaptiveSpin:
    """How long to spin before sleeping, and when to spin again, learnt from the last waits.

    A wait that ended within twice the full window restores it; each longer one halves it, down to
    `LEAST_SPIN_SECONDS`, so that a process that waits long every time does not burn its core.

    Waits that all take about as long, as between the steps of a model, are expected to do so again:
    to be awake by then spares the wake-up, and the time for which caches are cold after it.
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
            self._alike -= 2  # one that differs does not make the others irregular
            if self._alike <= 0:
                self._usual_ns, self._alike = waited_ns, 0

    def lookout(self, since_ns: int, look: Callable[[float], bool]) -> Lookout | None:
        """When to ``look`` in a wait that began at ``since_ns``; None if waits are not regular."""
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

    Attributes:
        owner_lock: takes the turn, if no thread has it, as a context manager, and tells whether it
        did.
    """

    def __init__(self) -> None:
        self.owner_lock = Turn()

    def acquire(self, deadline: Deadline, operation: str, check: Callable[[str], None]) -> None:
        """Wait for the turn, inside ``with lock.turn``.

        Args:
            deadline: when to give up.
            operation: what the turn is for, for messages.
            check: called with ``operation`` every `SLICE_SECONDS`; what it raises ends the wait.

        Raises:
            GroupTimeoutError: another thread has kept the turn until the deadline.
        """
        while not self.owner_lock.take_within(deadline.remaining(SLICE_SECONDS)):
            check(operation)
            if deadline.expired:
                raise GroupTimeoutError(
                    operation, deadline.timeout, detail="another thread of this process is in it"
                )
