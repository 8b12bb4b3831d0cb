"""Waiting for operations of a torch process group, and saying what went wrong in them.

Facts about gloo that shape this file (torch 2.11 to 2.13):

- Aborting a group does not free a call that waits in it, and destroying one waits for its
  operations, so that a hanging one would keep the process from ending.
- The work of a collective can be waited for in slices. That of a send or a receive cannot:
  it does not know that it is complete until it is waited for, and if that wait expires,
  all connections of the group are broken. So it is waited for on a helper thread; or, where
  the caller waits as well, right there and under a `Guard`.
- Broken connections end every operation of the group with an error, here and on the peers.
  `Connections.break_off` breaks them on purpose: the only way to free what waits.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from device_comm.torch_group import under_way
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.doorbell import DEFAULT_SPIN_SECONDS
from shm_broadcast.errors import (
    CoordinatorError,
    GroupAbortedError,
    GroupTimeoutError,
    PeerLostError,
    TransportError,
    closed_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from device_comm.torch_group.arrivals import Arrival
    from device_comm.torch_group.helper_threads import Job
    from device_comm.watch import Watch

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


class Boundary:
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
        farewell: Farewell | None = None,
    ) -> None:
        """As the watch's. A peer that has gone may have done its part, which still arrives.

        ``farewell`` is that of the only one of ``peers``, where it is waited for in a message.
        """
        done = ready if farewell is None else lambda: ready() or farewell.is_over()
        try:
            self.watch.wait(done, deadline, operation, lambda: peers, poll=poll, spin=spin)
            if farewell is not None and not ready():
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


class Farewell:
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
        boundary: Boundary,
        arrival: Arrival,
    ) -> None:
        """Follow ``work``; ``finish`` is what is to be done when it has succeeded."""
        self._arrival = arrival
        self._work = work
        under_way.keep_until_done(work)
        self._finish = finish
        self._operation = operation
        self._peers = peers
        self._boundary = boundary

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
        under_way.let_go(self._work)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _wait_long(self, deadline: Deadline) -> None:
        self._boundary.wait(self.ready, deadline, self._operation, self._peers, poll=_POLL)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._boundary.translate(error, self._operation, self._peers, deadline) from error

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
        boundary: Boundary,
        farewell: Farewell | None,
    ) -> None:
        """Follow ``job``, which concerns the one member in ``peers``."""
        self._farewell = farewell
        self._job = job
        self._operation = operation
        self._peers = peers
        self._boundary = boundary

    def ready(self) -> bool:
        """Whether the helper is done."""
        return self._job.done

    def wait(self, deadline: Deadline) -> None:
        """Wait for the helper, in a way that ends."""
        # no spinning: the helper needs the interpreter
        self._boundary.wait(
            lambda: self._job.done,
            deadline,
            self._operation,
            self._peers,
            spin=0,
            farewell=self._farewell,
        )
        error = self._job.error
        if isinstance(error, CoordinatorError):
            raise error
        if error is not None:
            raise self._boundary.translate(error, self._operation, self._peers, deadline) from error


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
