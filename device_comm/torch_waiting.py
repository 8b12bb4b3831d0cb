"""Wait for operations of torch process groups within a deadline; find causes of errors.

The last reference to a collective also frees its tensors, and torch acquires the GIL for that.
Before Python 3.14, a thread that does so at interpreter shutdown is ended within a destructor,
which terminates the process ("terminate called without an active exception"). So each collective is
referenced until it is waited for, or until another one begins after it has ended. The rest is never
freed.

Blocking calls run on helper threads (`Job`). A waiting thread polls `Job.done` with a deadline and
the watch; after a timeout the helper thread and its tensors stay until the call returns. Helper
threads are daemons. Where the caller waits anyway, the call runs in the caller's thread, and
`device_comm.watchdog` breaks the connections on a failure, so that the call raises.

Facts about gloo (torch 2.11 to 2.13):

- Aborting a group does not end a blocked call, and destroying a group waits for its operations.
- A collective can be waited for in slices. A send or receive cannot: only a wait detects its
  completion, and a wait that times out breaks all connections of the group.
- Broken connections end every operation of the group with an error, here and on the peers.
  `Connections.break_off` breaks them on purpose: nothing else ends a blocked call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch

from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    CoordinatorError,
    GroupAbortedError,
    GroupTimeoutError,
    PeerLostError,
    TransportError,
    closed_by,
)
from shm_broadcast.eventcount import DEFAULT_SPIN_SECONDS

if TYPE_CHECKING:
    import torch.distributed as dist

    from device_comm.watch import Watch


def _never_dropped() -> set[dist.Work]:
    # The extra reference keeps the set alive through interpreter shutdown.
    immortal: set[dist.Work] = set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(immortal))
    return immortal


_kept = _never_dropped()


def retain_until_done(work: dist.Work) -> None:
    """Keep a reference to ``work``; drop those to ended ones."""
    for each in [*_kept]:
        if each.is_completed():
            _kept.discard(each)
    _kept.add(work)


def release(work: dist.Work) -> None:
    """Drop the reference to ``work``, after a wait."""
    _kept.discard(work)


_IDLE_SECONDS = 1.0
"""Seconds after which an idle thread exits."""


class Job:
    """One call. ``error`` is its exception, once it is ``done``."""

    def __init__(self, call: Callable[[], object], wake: Callable[[], None]) -> None:
        self._call: Callable[[], object] | None = call
        self._wake = wake
        self.done = False
        self.error: Exception | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the call, then wake the waiting thread."""
        if self._call is not None:
            try:
                self._call()
            except Exception as error:  # noqa: BLE001 - raised where the job is waited for
                self.error = error
        self._call = None
        self.done = True
        self._ended.set()
        self._wake()
        del self  # the error's traceback references this frame

    def join(self) -> None:
        """Block a helper thread until the call is done; raise its exception."""
        self._ended.wait()
        if self.error is not None:
            raise self.error


class HelperThreads:
    """The pool of this process with one thread per running call; idle threads are reused."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0

    def start(self, call: Callable[[], object], wake: Callable[[], None]) -> Job:
        """Run ``call``, then ``wake()``, on a thread."""
        job = Job(call, wake)
        with self._lock:
            spare = self._free > 0
            if spare:
                self._free -= 1
        if not spare:  # before the put: if it fails, the queue stays empty
            threading.Thread(target=self._work, name="blocking-call", daemon=True).start()
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:  # the queue is about to receive an entry for this thread
                        continue
                    self._free -= 1
                return
            job.run()
            del job
            with self._lock:
                self._free += 1


HELPERS: Final = HelperThreads()


def _after_fork_in_child() -> None:
    # The child neither polls nor frees the parent's collectives, and has none of its threads.
    global _kept
    _kept = _never_dropped()
    HELPERS.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork_in_child)


_FIRST_LOOK = 0.05
"""Seconds of the first wait, by torch itself; then the watch waits."""

_POLL = 0.002
"""Seconds between two polls of a collective afterwards."""

_NEVER_SENT = 1
"""A tag without messages."""

_ON_ITS_WAY = 0.3
"""Seconds until the last bytes of a dead peer are received."""

_CAUSE_SECONDS = 2.0
"""Seconds to wait for the cause of a broken connection, even beyond the deadline."""

_ALL_SENT = 2.0
"""Seconds until the last bytes of a peer that closed its end are received, on a busy machine."""


_POLL_LIMIT = 0.1
"""The longest interval between two polls of a closed peer that counts, in seconds."""


class ErrorTranslator:
    """Translates torch's errors to this project's. One per communicator."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Sequence[int],
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
        drain: DrainAfterClose | None = None,
    ) -> None:
        """Wait like `Watch.wait`, and accept data that a lost peer sent before its end.

        ``drain`` belongs to the only one of ``peers``, in a message.
        """
        done = ready if drain is None else lambda: ready() or drain.is_over()
        try:
            self.watch.wait(done, deadline, operation, lambda: peers, poll=poll, spin=spin)
            if drain is not None and not ready():
                error = closed_by(operation, self.watch.member_status(peers[0]).rank)
                self.watch.abort(error, peers[0])
                raise error
        except PeerLostError as lost:
            arrives = self.arrives(lost, deadline)
            try:
                self.watch.wait(ready, arrives, operation, tuple, poll=poll, spin=spin)
            except (GroupTimeoutError, GroupAbortedError):
                raise lost from None

    @staticmethod
    def arrives(lost: PeerLostError, deadline: Deadline) -> Deadline:
        """Return when the last data of a lost peer has arrived."""
        at_most = _ALL_SENT if lost.peer.state == "closed" else _ON_ITS_WAY
        return Deadline.after(deadline.remaining(at_most=at_most))

    def translate(
        self, error: Exception, operation: str, peers: Sequence[int], deadline: Deadline
    ) -> CoordinatorError:
        """Return the cause of ``error``, or a `TransportError`.

        A peer that closes its connections may have aborted the group. So the board has
        `_CAUSE_SECONDS` to receive the reason, before the connection counts as the cause.
        """
        detail = str(error).partition("\n")[0]
        is_late = deadline.expired
        try:
            if not is_late:
                is_settled = self.watch.suspect(peers)
                latest = max(deadline, Deadline.after(_CAUSE_SECONDS), key=lambda each: each.at)
                self.watch.wait(
                    lambda: is_settled() or latest.expired, NEVER, operation, lambda: peers
                )
            now = Deadline(0.0, deadline.timeout)
            self.watch.wait(bool, now, operation, lambda: peers)
        except GroupTimeoutError as timed_out:
            if is_late:
                return timed_out
            if "timed out" in detail.lower():
                return GroupTimeoutError(operation, None, timed_out.waiting_for, detail)
            detail = "; ".join(filter(None, (detail, timed_out.detail)))
        except CoordinatorError as cause:
            return cause
        return TransportError(operation, detail, peers[0] if len(peers) == 1 else None)


class DrainAfterClose:
    """Detects that a peer closed the group, and that no message can still arrive.

    Time while this process was stopped (SIGSTOP) does not count.
    """

    def __init__(self, has_closed: Callable[[int], bool], peer: int) -> None:
        self._has_closed = has_closed
        self._peer = peer
        self._polled_at = 0.0
        self._seen = 0.0

    def is_over(self) -> bool:
        """Return True if no more data can arrive."""
        if not self._has_closed(self._peer):
            return False
        now = time.monotonic()
        self._seen += min(now - self._polled_at, _POLL_LIMIT) if self._polled_at else 0.0
        self._polled_at = now
        return self._seen > _ALL_SENT


class CollectivePending:
    """A collective in a torch process group."""

    def __init__(
        self,
        work: dist.Work,
        finish: Callable[[], None] | None,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
    ) -> None:
        """Follow ``work``; the first successful wait calls ``finish``."""
        self._work = work
        retain_until_done(work)
        self._finish = finish
        self._operation = operation
        self._peers = peers
        self._errors = boundary

    def ready(self) -> bool:
        """Return True if torch is done."""
        return self._work.is_completed()

    def wait(self, deadline: Deadline) -> None:
        """Wait within the deadline; raise the cause of a failure."""
        if not self._wait_shortly(deadline):
            self._wait_long(deadline)
        release(self._work)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _wait_long(self, deadline: Deadline) -> None:
        self._errors.wait(self.ready, deadline, self._operation, self._peers, poll=_POLL)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._errors.translate(error, self._operation, self._peers, deadline) from error

    def _wait_shortly(self, deadline: Deadline) -> bool:
        """Return True on success; False if the collective is incomplete or failed."""
        milliseconds = int(1000 * deadline.remaining(at_most=_FIRST_LOOK))
        if not milliseconds:  # torch treats 0 as unlimited
            return False
        try:
            self._work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError:  # the next wait distinguishes a timeout from a failure
            return False
        return True


class StreamPending:
    """An operation of a stream-ordered backend, such as NCCL."""

    def __init__(self, work: dist.Work, finish: Callable[[], None] | None) -> None:
        """Follow ``work``; ``finish`` queues its work on the stream afterwards."""
        self._work = work
        self._finish = finish

    def ready(self) -> bool:
        """Return True if the device is done."""
        return self._work.is_completed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Make the current stream wait for the operation."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class TransferPending:
    """A background send or receive that a helper thread waits for."""

    def __init__(
        self,
        job: Job,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
        drain: DrainAfterClose | None,
    ) -> None:
        """Follow ``job``; ``peers`` is the one other member."""
        self._drain = drain
        self._job = job
        self._operation = operation
        self._peers = peers
        self._errors = boundary

    def ready(self) -> bool:
        """Return True if the helper thread is done."""
        return self._job.done

    def wait(self, deadline: Deadline) -> None:
        """Wait within the deadline; raise the cause of a failure."""
        # No spinning: the helper thread needs the GIL.
        self._errors.wait(
            lambda: self._job.done,
            deadline,
            self._operation,
            self._peers,
            spin=0,
            drain=self._drain,
        )
        error = self._job.error
        if isinstance(error, CoordinatorError):
            raise error
        if error is not None:
            raise self._errors.translate(error, self._operation, self._peers, deadline) from error


class Connections:
    """The connections of a process group, which can be broken once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._broken_off = group.size() == 1

    def break_off(self) -> None:
        """End all operations of the group with errors, permanently."""
        if self._broken_off:
            return
        self._broken_off = True
        group = self._group
        if group.name() != "gloo":
            group.abort()
            return
        # A timeout on any intact connection breaks all of them.
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                receive = group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT)
                receive.wait(timedelta(milliseconds=1))
