"""Wait for operations of torch process groups within a deadline, and find out why one failed.

Whoever drops the last reference to a collective drops its tensors, and torch takes Python's lock
for that. A thread that asks for it while Python comes to its end is ended by Python (before 3.14),
in the middle of a destructor, which ends the process: "terminate called without an active
exception". It happened where a collective was given up, as its peers were late, and the program
ended soon after.

So a collective is kept, and its tensors with it, until it was waited for or, if that failed or
nobody does it, until another one begins after it has ended. What is left at the end of the process
stays. Of one that was waited for torch's thread lets go within microseconds.

Whoever needs the result waits for `Job.done`, with a deadline and an eye on its peers, and
walks away if it must: the thread, and all that the call uses, then stay as they are until
the call returns by itself. Threads are daemons: none holds up the end of the process.

Each member notes on its board which collective of its group it has begun (`Arrivals.begin`). So a
member that waits in vain can name those that are behind.

Facts about gloo that shape this file (torch 2.11 to 2.13):

- Aborting a group does not free a call that waits in it, and destroying one waits for its
  operations, so that a hanging one would keep the process from ending.
- The work of a collective can be waited for in slices. That of a send or a receive cannot:
  it does not know that it is complete until it is waited for, and if that wait expires,
  all connections of the group are broken. So it is waited for on a helper thread; or, where
  the caller waits as well, right there and under a `BlockingCallWatchdog`.
- Broken connections end every operation of the group with an error, here and on the peers.
  `Connections.break_off` breaks them on purpose: the only way to free what waits.

The call runs where it is made, without a detour through another thread. The guard looks at
the group now and then; should it fail, or the deadline pass, the guard ends what the call waits
for, and the call raises.

Neither the thread nor an error holds anything of a guard that is closed: what belongs to the
group goes with the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

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
    """A set that the end of Python leaves as it is."""
    made: set[dist.Work] = set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


_kept = _never_dropped()


def retain_until_done(work: dist.Work) -> None:
    """Keep ``work``, which has begun, and those before it no more that have ended."""
    for each in [*_kept]:
        if each.is_completed():
            _kept.discard(each)
    _kept.add(work)


def release(work: dist.Work) -> None:
    """Keep ``work`` no more: it was waited for."""
    _kept.discard(work)


def _after_fork_in_child() -> None:
    """In a forked child: what the parent works on is neither looked at here nor dropped."""
    global _kept
    _kept = _never_dropped()


os.register_at_fork(after_in_child=_after_fork_in_child)

_IDLE_SECONDS = 10.0
"""How long a thread without work stays."""


class Job:
    """One call. ``error`` is what it raised, once it is ``done``."""

    def __init__(self, call: Callable[[], object], wake: Callable[[], None]) -> None:
        self._call: Callable[[], object] | None = call
        self._wake = wake
        self.done = False
        self.error: Exception | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Call, and wake whoever waits."""
        if self._call is not None:
            try:
                self._call()
            except Exception as error:  # noqa: BLE001 - raised where the job is waited for
                self.error = error
        self._call = None
        self.done = True
        self._ended.set()
        self._wake()
        del self  # its error holds this frame

    def join(self) -> None:
        """Return once it is done, on another helper thread.

        Raises:
            Exception: what it raised.
        """
        self._ended.wait()
        if self.error is not None:
            raise self.error


class HelperThreads:
    """As many threads as there are calls under way; a free one is used again."""

    def __init__(self, name: str) -> None:
        """Start none yet.

        Args:
            name: what the threads are called.
        """
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._closed = False

    def start(self, call: Callable[[], object], wake: Callable[[], None]) -> Job:
        """Run ``call`` on a thread, then ``wake()`` there."""
        job = Job(call, wake)
        with self._lock:
            spare = self._free > 0
            if spare:
                self._free -= 1
        if not spare:  # first: a job that no thread takes would be the next one's
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the threads: the free ones now, the others after their calls."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, 0
        for _ in range(free):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:  # a job, or the end, is on its way to this thread
                        continue
                    self._free -= 1
                return
            if job is None:
                return
            job.run()
            del job
            with self._lock:
                if self._closed:
                    return
                self._free += 1


_COUNT_BITS: Final = 32
_GROUP_BITS: Final = 20
"""Together less than 53, so that the number stays whole in JSON."""

_made: WeakKeyDictionary[Watch, Counter[tuple[str, tuple[int, ...]]]] = WeakKeyDictionary()
"""How many groups of a name and members were made on each board: its members count alike, whatever
groups they have been in elsewhere."""


class Arrivals:
    """The collectives of one group, as one member begins them."""

    def __init__(self, watch: Watch, name: str, members: Sequence[int], rank: int) -> None:
        """Count from the first; its members make a group in the same order as others alike.

        Args:
            watch: the board that says what the members do.
            name: the group's.
            members: their numbers on the board, by rank in the group.
            rank: this member's in the group.
        """
        alike, made = (name, tuple(members)), _made.setdefault(watch, Counter())
        made[alike] += 1
        group = zlib.crc32(repr((alike, made[alike])).encode()) % (1 << _GROUP_BITS)
        self._begun = group << _COUNT_BITS
        self._watch = watch
        self._peers = [member for r, member in enumerate(members) if r != rank]

    def begin(self) -> Arrival:
        """The next collective begins here, in the operation that was stamped last."""
        self._begun += 1
        self._watch.in_collective(self._begun)
        return Arrival(self._watch, self._begun, self._peers)


class Arrival:
    """One collective, for those that wait in it."""

    def __init__(self, watch: Watch, number: int, peers: Sequence[int]) -> None:
        self._watch = watch
        self._number = number
        self._peers = peers

    def only_those_behind(self, late: GroupTimeoutError) -> GroupTimeoutError:
        """The same error, without the members that have come to the collective."""
        self._watch.refresh_remote()
        behind = tuple(
            status
            for status in (self._watch.member_status(member) for member in self._peers)
            if not self._has_come(status.collective)
        )
        if not behind:
            return late
        return GroupTimeoutError(late.operation, late.timeout, behind, late.detail)

    def _has_come(self, collective: int) -> bool:
        same_group = collective >> _COUNT_BITS == self._number >> _COUNT_BITS
        return same_group and collective >= self._number


_FIRST_LOOK = 0.05
"""Seconds that torch itself waits for a collective, before the watch does."""

_POLL = 0.002
"""Seconds between two looks at a collective that has taken longer."""

_NEVER_SENT = 1
"""A tag that nobody sends with."""

_ON_ITS_WAY = 0.3
"""Seconds that the last bytes of a peer that has died may take to be taken in here."""

_CAUSE_SECONDS = 2.0
"""How long to look for the cause of a broken connection, even if the deadline passes meanwhile."""

_ALL_SENT = 2.0
"""The same for a peer that has left in good order: a busy machine keeps threads waiting so long."""


_LOOK_SECONDS = 0.1
"""What counts of the time between two looks whether a peer has closed the group, at most."""


class ErrorTranslator:
    """Where errors of torch become errors of this project. One per communicator."""

    def __init__(self, watch: Watch) -> None:
        """Translate for a communicator that ``watch`` belongs to."""
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
        """As the watch's. A peer that has gone may have done its part, which still arrives.

        ``drain`` is that of the only one of ``peers``, where it is waited for in a message.
        """
        done = ready if drain is None else lambda: ready() or drain.is_over()
        try:
            self.watch.wait(done, deadline, operation, lambda: peers, poll=poll, spin=spin)
            if drain is not None and not ready():
                error = closed_by(operation, self.watch.member_status(peers[0]).rank)
                self.watch.abort(error, peers[0])
                raise error
        except PeerLostError as lost:
            at_most = _ALL_SENT if lost.peer.state == "closed" else _ON_ITS_WAY
            arrives = Deadline.after(deadline.remaining(at_most=at_most))
            try:
                self.watch.wait(ready, arrives, operation, tuple, poll=poll, spin=spin)
            except (GroupTimeoutError, GroupAbortedError):
                raise lost from None

    def translate(
        self, error: Exception, operation: str, peers: Sequence[int], deadline: Deadline
    ) -> CoordinatorError:
        """The error to raise, from ``error``, in its place: the cause, if it can be found.

        A peer that closes its connections may have aborted, for a reason that is yet to be heard:
        so nobody is blamed for the connection before the watch had the time to tell.
        """
        said = str(error).partition("\n")[0]
        late = deadline.expired
        try:
            if not late:
                known = self.watch.suspect(peers)
                latest = max(deadline, Deadline.after(_CAUSE_SECONDS), key=lambda each: each.at)
                self.watch.wait(lambda: known() or latest.expired, NEVER, operation, lambda: peers)
            now = Deadline(0.0, deadline.timeout)
            self.watch.wait(bool, now, operation, lambda: peers)
        except GroupTimeoutError as nobody:
            if late:
                return nobody
            if "timed out" in said.lower():
                return GroupTimeoutError(operation, None, nobody.waiting_for, said)
            said = "; ".join(filter(None, (said, nobody.detail)))
        except CoordinatorError as cause:
            return cause
        return TransportError(operation, said, peers[0] if len(peers) == 1 else None)


class DrainAfterClose:
    """Whether the other end of one message has closed the group, and what it sent before is here.

    Counted is only time in which this process looked: one that was stopped has received nothing.
    """

    def __init__(self, has_closed: Callable[[int], bool], peer: int) -> None:
        """Of member ``peer``; ``has_closed`` says whether a member has closed the group."""
        self._has_closed = has_closed
        self._peer = peer
        self._looked_at = 0.0
        self._seen = 0.0

    def is_over(self) -> bool:
        """Whether nothing will come any more."""
        if not self._has_closed(self._peer):
            return False
        now = time.monotonic()
        self._seen += min(now - self._looked_at, _LOOK_SECONDS) if self._looked_at else 0.0
        self._looked_at = now
        return self._seen > _ALL_SENT


class CollectivePending:
    """A collective under way in a torch process group."""

    def __init__(
        self,
        work: dist.Work,
        finish: Callable[[], None] | None,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
        arrival: Arrival,
    ) -> None:
        """Follow ``work``; ``finish`` is what is to be done when it has succeeded."""
        self._arrival = arrival
        self._work = work
        retain_until_done(work)
        self._finish = finish
        self._operation = operation
        self._peers = peers
        self._errors = boundary

    def ready(self) -> bool:
        """Whether torch is done."""
        return self._work.is_completed()

    def wait(self, deadline: Deadline) -> None:
        """Wait for torch, in a way that ends."""
        if not self._wait_shortly(deadline):
            try:
                self._wait_long(deadline)
            except GroupTimeoutError as late:
                raise self._arrival.only_those_behind(late) from late.__cause__
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
        """Whether it has succeeded at once. If not, it is under way, or has failed."""
        milliseconds = int(1000 * deadline.remaining(at_most=_FIRST_LOOK))
        if not milliseconds:  # to torch, 0 means for ever
            return False
        try:
            self._work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError:  # too late or failed, which is known when it is waited for again
            return False
        return True


class StreamPending:
    """An operation of a backend that works in stream order, as NCCL does."""

    def __init__(self, work: dist.Work, finish: Callable[[], None] | None) -> None:
        """Follow ``work``; ``finish`` is put on the stream behind it."""
        self._work = work
        self._finish = finish

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._work.is_completed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Let the current stream wait for the operation."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class TransferPending:
    """A send or a receive in the background, waited for on a helper thread."""

    def __init__(
        self,
        job: Job,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
        drain: DrainAfterClose | None,
    ) -> None:
        """Follow ``job``, which concerns the one member in ``peers``."""
        self._drain = drain
        self._job = job
        self._operation = operation
        self._peers = peers
        self._errors = boundary

    def ready(self) -> bool:
        """Whether the helper is done."""
        return self._job.done

    def wait(self, deadline: Deadline) -> None:
        """Wait for the helper, in a way that ends."""
        # no spinning: the helper needs the interpreter
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
    """The connections of a process group, which break once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Of ``group``, which must have two ranks or more to break anything."""
        self._group = group
        self._broken_off = group.size() == 1

    def break_off(self) -> None:
        """End all operations of the group, for good, with errors. Collective: no."""
        if self._broken_off:
            return
        self._broken_off = True
        group = self._group
        if group.name() != "gloo":
            group.abort()
            return
        # The first one that is not broken yet breaks them all.
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                never = group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))


_TICK = 0.02
"""Seconds between two looks at the group."""

_IDLE_TICKS = 50
"""Looks at nothing before the thread ends; the next call starts it again."""

_LEAVE_SECONDS = 0.4
"""How long `Guard.close` waits for the thread, which takes a tick unless the machine is busy."""


@dataclass(eq=False, slots=True)
class _WatchedCall:
    """One call that is watched over; ``error`` is what was seen of the group meanwhile."""

    operation: str
    peers: Sequence[int]
    deadline: Deadline
    drain: DrainAfterClose | None
    error: Exception | None = None


class BlockingCallWatchdog:
    """Watches over one call at a time."""

    def __init__(
        self, name: str, boundary: ErrorTranslator, end: Callable[[Exception], None]
    ) -> None:
        """Start no thread yet.

        Args:
            name: what the thread is called.
            boundary: looks at the group.
            end: makes the call raise, because of an error that the group is told first: peers may
                notice that the call has ended, and must find why.
        """
        self._name = name
        self._errors = boundary
        self._end = end
        self._lock = threading.Lock()
        self._watched_call: _WatchedCall | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def call(
        self,
        block: Callable[[], object],
        operation: str,
        peers: Sequence[int],
        deadline: Deadline,
        drain: DrainAfterClose | None = None,
    ) -> None:
        """Run ``block``, which needs ``peers``, until ``deadline``; ``drain`` is as for
        `ErrorTranslator.wait`.

        Raises:
            GroupTimeoutError: it took too long.
            Exception: the group failed meanwhile, or could not be looked at.
            RuntimeError: what ``block`` raises else.
        """
        shift = _WatchedCall(operation, peers, deadline, drain)
        with self._lock:
            self._watched_call = shift
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        try:
            block()
        except RuntimeError as error:
            if shift.error is not None:
                raise shift.error from error
            raise
        finally:
            self._watched_call = None
            del shift  # its error would hold this frame, and with it itself

    def close(self) -> None:
        """End the thread: now, or when the call ends that another thread is in."""
        self._over.set()
        thread = self._thread
        if thread is not None and self._watched_call is None:
            thread.join(_LEAVE_SECONDS)

    def _watch(self) -> None:
        idle = 0
        while not (idle >= _IDLE_TICKS or self._over.is_set()) or not self._leave():
            shift = self._watched_call
            if shift is None:
                idle += 1
                self._over.wait(_TICK)
            else:
                idle = 0
                self._look(shift)

    def _leave(self) -> bool:
        with self._lock:
            if self._watched_call is None:
                self._thread = None
            return self._thread is None

    def _look(self, shift: _WatchedCall) -> None:
        try:
            self._errors.wait(
                lambda: self._watched_call is not shift,
                shift.deadline,
                shift.operation,
                shift.peers,
                poll=_TICK,
                spin=0,
                drain=shift.drain,
            )
        except Exception as error:  # noqa: BLE001 - a call that is not watched over may hang
            shift.error = error.with_traceback(None)  # whose frames hold the shift
            self._end(shift.error)
            while self._watched_call is shift:
                time.sleep(_TICK)
