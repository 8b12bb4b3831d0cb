"""Watch operations that nothing can interrupt, and end them when they fail.

These are calls that block inside torch or NCCL, work on a CUDA stream, and kernels that wait for a
peer. One thread per process polls all of them; it exits when there are none. An operation fails if
its deadline passes, a peer is lost, or the group is aborted. The callback then ends it, after it
has aborted the group: peers may detect the end, and need its cause.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import GroupTimeoutError, PeerLostError

if TYPE_CHECKING:
    from device_comm.cuda.driver import StreamEvent
    from device_comm.torch_waiting import DrainAfterClose, ErrorTranslator


_log = logging.getLogger(__name__)

TICK: Final = 0.02
"""Seconds between two polls of operations under way."""

SLOW_TICK: Final = 0.1
"""The same if there are only groups whose kernels or graphs may be running."""

_IDLE_TICKS: Final = 50
"""Ticks without operations before the thread exits; the next operation restarts it."""

_SHOWN_SECONDS: Final = 0.1
"""Seconds after which inspection shows that a call blocks."""


@dataclass(eq=False, slots=True)
class Issued:
    """An operation, which needs the members ``peers``.

    Attributes:
        mark: the event after it on its stream; None during its launch or call.
        over: it needs no more watching.
        drain: see `ErrorTranslator.wait`.
    """

    operation: str
    deadline: Deadline
    peers: Sequence[int]
    mark: StreamEvent | None = None
    over: bool = False
    drain: DrainAfterClose | None = None

    def done(self) -> bool:
        """Return True if the device is done, or it is over. Never blocks."""
        return self.over or (self.mark is not None and self.mark.query())

    def failure(self, errors: ErrorTranslator) -> Exception | None:
        """Return the error that ends it; None while there is none. Never blocks."""
        now = Deadline(0.0, self.deadline.timeout)
        try:
            errors.wait(self.done, now, self.operation, self.peers, spin=0, drain=self.drain)
        except GroupTimeoutError as late:
            return late if self.deadline.expired else None
        except Exception as error:  # noqa: BLE001 - an unwatched operation may hang
            return error
        return None


class Subject(ABC):
    """Polled by the watchdog's thread, every ``tick`` seconds, until it needs no more watching."""

    def __init__(self) -> None:
        self.tick = TICK
        self._polling = threading.RLock()
        self._closed = False

    @abstractmethod
    def update(self) -> bool:
        """Poll it; return True if it needs more watching."""

    def poll(self) -> bool:
        """Call `update`, unless it is closed."""
        with self._polling:
            return not self._closed and self.update()

    def close(self, timeout: float = 1.0) -> None:
        """End the watch, for good; wait up to ``timeout`` s for a `poll` in another thread."""
        self._closed = True
        if self._polling.acquire(timeout=timeout):
            self._polling.release()


class Watchdog:
    """The thread that polls the subjects of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subjects: dict[Subject, None] = {}
        self._thread: threading.Thread | None = None
        self._added = threading.Event()
        self._slow = False

    def add(self, subject: Subject) -> None:
        """Poll ``subject`` from now on; RuntimeError if no thread can be started."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                thread.start()
                self._thread = thread
            self._subjects[subject] = None
        if self._slow:
            self._added.set()

    def drop(self, subject: Subject) -> None:
        """Drop a closed subject at once, rather than at the next poll."""
        self._subjects.pop(subject, None)

    def _run(self) -> None:
        idle = 0
        while not self._exits(idle):
            subjects = tuple(self._subjects)
            idle = 0 if subjects else idle + 1
            tick = min((subject.tick for subject in subjects), default=TICK)
            self._slow = tick > TICK
            self._added.clear()
            self._poll(subjects)
            del subjects
            self._added.wait(tick)

    def _poll(self, subjects: Sequence[Subject]) -> None:
        for subject in subjects:
            self._subjects.pop(subject, None)  # first: `add` may be called meanwhile
            try:
                if subject.poll():
                    self._subjects[subject] = None
            except Exception:  # noqa: BLE001 - the other subjects need the thread
                _log.exception("the watchdog cannot end a failed operation")

    def _exits(self, idle: int) -> bool:
        with self._lock:
            if idle >= _IDLE_TICKS and not self._subjects:
                self._thread = None
            return self._thread is None


WATCHDOG: Final = Watchdog()


def _after_fork_in_child() -> None:
    WATCHDOG.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork_in_child)


class BlockingCall(Subject):
    """A call that blocks its thread; ``failure`` is the error that has ended it."""

    def __init__(
        self, issued: Issued, errors: ErrorTranslator, end: Callable[[Exception], object]
    ) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._issued = issued
        self._errors = errors
        self._fail = end
        self._lost: PeerLostError | None = None
        self._arrives = NEVER
        self._show_at = time.monotonic() + _SHOWN_SECONDS
        self._shown: ExitStack | None = None

    def update(self) -> bool:
        """End the call if it has failed; publish it for inspection after a while."""
        issued = self._issued
        error = issued.failure(self._errors)
        if isinstance(error, PeerLostError) and self._lost is None:
            self._lost, self._arrives = error, self._errors.arrives(error, issued.deadline)
        if error is not None and self._lost is not None:
            error = self._lost if self._arrives.expired else None
        if error is not None:
            self.failure = error.with_traceback(None)  # its frames reference the call
            self._fail(self.failure)
        elif self._shown is None and time.monotonic() >= self._show_at:
            self._shown = ExitStack()
            wait = self._errors.watch.published_wait(issued.operation)
            self._shown.enter_context(wait)(issued.peers)
        return error is None

    def end(self) -> None:
        """End the watch, since the call has returned."""
        with self._polling:
            self._issued.over = self._closed = True
            if self._shown is not None:
                self._shown.close()


def call_watched(
    block: Callable[[], object],
    issued: Issued,
    errors: ErrorTranslator,
    end: Callable[[Exception], object],
) -> None:
    """Run ``block``; if it fails as ``issued``, call ``end``, which makes it raise.

    Raises the failure instead of the RuntimeError of ``block`` that it caused.
    """
    call = BlockingCall(issued, errors, end)
    WATCHDOG.add(call)
    try:
        block()
    except RuntimeError as error:
        if call.failure is not None:
            raise call.failure from error
        raise
    finally:
        call.end()
        WATCHDOG.drop(call)
        del call  # its error references this frame: a cycle


class StreamWatch(Subject):
    """The operations of one communicator on streams, and the operation now being launched.

    Operations end in order, so only the oldest and the newest unfinished ones are kept, with one
    event per operation. Replays of a graph are not observable: after a capture the group is watched
    until `close`.
    """

    def __init__(
        self,
        name: str,
        errors: ErrorTranslator,
        peers: Sequence[int],
        check: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Watch nothing yet.

        Args:
            peers: the member numbers of the ranks that a replayed graph needs.
            check: polled; raises if current operations have failed.
            failed: called once, in the watchdog's thread, with the error.
        """
        super().__init__()
        self._errors = errors
        self._check = check
        self._failed = failed
        self._changing = threading.Lock()
        self._oldest: Issued | None = None
        self._newest: Issued | None = None
        self._replay = Issued(f"{name} replay", NEVER, peers)
        self._replays = False

    def follow(self, issued: Issued) -> None:
        """Watch an operation, which is launched next."""
        with self._changing:
            if self._oldest is None:
                self._oldest = issued
            else:
                self._newest = issued
        self.tick = TICK
        WATCHDOG.add(self)

    def follow_replays(self) -> None:
        """Watch the group from now on, since captured graphs may be replayed."""
        self._replays = True
        WATCHDOG.add(self)

    def update(self) -> bool:
        """Drop finished operations; report the failure of the oldest unfinished one."""
        issued = self._replay
        try:
            while (oldest := self._oldest) is not None and oldest.done():
                with self._changing:
                    self._oldest, self._newest = self._newest, None
            if oldest is not None:
                issued = oldest
            elif self._replays:
                self.tick = SLOW_TICK
            else:
                return False
            self._check()
            error = issued.failure(self._errors)
        except Exception as failed:  # noqa: BLE001 - an unwatched operation may hang
            error = failed
        if isinstance(error, GroupTimeoutError):  # named like the other errors of streams
            error = GroupTimeoutError(issued.operation, error.timeout, error.waiting_for)
        if error is not None and not self._closed:
            self._closed = True
            self._failed(error)
        return not self._closed
