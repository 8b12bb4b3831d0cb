"""Watch a group's board for communicators, and record their operations on it.

`Watch` is the interface, which `shm_broadcast.Board` offers. `LoneWatch` is for a communicator
without a board: it knows deadlines and this process's own aborts, but nothing about its peers.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from device_comm.operation import NO_TENSOR, ROOTED, Operation
from device_comm.shm.signature import DTYPE_CODES
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import Failure, GroupAbortedError, GroupClosedError, MemberStatus
from shm_broadcast.eventcount import DEFAULT_SPIN_SECONDS
from shm_broadcast.layout import DID_NAMES, NO_PEER
from shm_broadcast.process import IN_FORKED_CHILD, call_in_forked_children
from shm_broadcast.state.table import kind_and_message

_SLICE = 0.02
"""The longest sleep between two calls of ``ready``, in seconds."""


class Watch(Protocol):
    """Deadlines, aborts and peers, as `shm_broadcast.Board` offers them."""

    @property
    def member(self) -> int | None:
        """This process's member number."""

    @property
    def aborted(self) -> Failure | None:
        """The first failure that was reported; None if the group was not aborted."""

    def record_begin(
        self,
        operation: str,
        group: str = "",
        verb: int = 0,
        size: int = 0,
        number: int = 0,
        peer: int = NO_PEER,
        dtype: int = 0,
    ) -> int:
        """Note that this member begins ``operation``; returns the operation's number."""

    def record_end(self, sequence: int, error: BaseException | None = None) -> None:
        """Note in this member's history how the operation of that number ended."""

    def in_collective(self, number: int) -> None:
        """Note the number of the group's collective, for `MemberStatus.collective`."""

    def member_status(self, member: int) -> MemberStatus:
        """What ``member`` was last seen doing."""

    def refresh_remote(self) -> None:
        """Update what is known of members on other hosts, before their status is read."""

    def idle(self) -> None:
        """Note that this member's operation has ended."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` if the group was aborted."""

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Report a failure: every waiting member raises `GroupAbortedError`.

        ``culprit`` is the member number that the failure is about; None: this member's.
        """

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
    ) -> None:
        """Wait until ``ready()``; raise on the deadline, an abort, or a lost peer.

        Args:
            ready: the condition.
            deadline: when to give up.
            operation: the operation's name, for errors.
            peers: the member numbers that are waited for.
            poll: seconds between two calls of ``ready`` at most, if nobody rings.
            spin: seconds to spin before sleeping.
        """

    def notify(self, member: int) -> None:
        """Wake ``member`` if it sleeps in `wait`."""

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Note that a connection with one of ``members`` broke.

        Returns:
            A function that returns whether by now `wait` for them has raised, if one has gone.
        """


class LoneWatch:
    """A `Watch` without a board: it sees only this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure: Failure | None = None
        self._is_forked_child = False
        self._bell = threading.Event()
        call_in_forked_children(self)

    @property
    def member(self) -> int:
        """This process's rank in its group."""
        return self._rank

    @property
    def aborted(self) -> Failure | None:
        """The failure that this process reported; None if it reported none."""
        return self._failure

    def record_begin(
        self,
        operation: str,  # noqa: ARG002 - no other process reads it
        group: str = "",  # noqa: ARG002
        verb: int = 0,  # noqa: ARG002
        size: int = 0,  # noqa: ARG002
        number: int = 0,  # noqa: ARG002
        peer: int = NO_PEER,  # noqa: ARG002
        dtype: int = 0,  # noqa: ARG002
    ) -> int:
        """Do nothing: no other process reads it."""
        return 0

    def record_end(self, sequence: int, error: BaseException | None = None) -> None:
        """Do nothing: no other process reads it."""

    def in_collective(self, number: int) -> None:
        """Do nothing: no other process reads it."""

    def member_status(self, member: int) -> MemberStatus:
        """Always ``"absent"``: other processes are not seen."""
        return MemberStatus(member, 0, "absent")

    def refresh_remote(self) -> None:
        """Do nothing: other processes are not seen."""

    def idle(self) -> None:
        """Do nothing: no other process reads it."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` if this process has aborted the group.

        Raises:
            GroupClosedError: a forked child's process is none of the group.
        """
        self._refuse_child(operation)
        if self._failure is not None:
            raise GroupAbortedError(operation, self._failure)

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Keep the first failure and wake this process's waiting thread.

        Raises:
            GroupClosedError: a forked child's process is none of the group.
        """
        self._refuse_child("abort")
        if self._failure is None:
            about = self._rank if culprit is None else culprit
            self._failure = Failure(self._rank, *kind_and_message(error), about)
        self._bell.set()

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],  # noqa: ARG002 - nobody is seen
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
    ) -> None:
        """Wait until ``ready()``; raise `GroupTimeoutError` or `GroupAbortedError`."""
        spin_until = time.monotonic() + spin
        while not ready():
            self.check(operation)
            deadline.check(operation)
            if time.monotonic() < spin_until:
                time.sleep(0)
                continue
            self._bell.wait(deadline.remaining(at_most=poll or _SLICE))
            self._bell.clear()

    def _refuse_child(self, operation: str) -> None:
        if self._is_forked_child:
            raise GroupClosedError(f"{operation}: {IN_FORKED_CHILD}")

    def after_fork_in_child(self) -> None:
        """In a forked child: the group is its parent's."""
        self._is_forked_child = True

    def notify(self, member: int) -> None:  # noqa: ARG002 - there is only this one
        """Wake this process's waiting thread."""
        self._bell.set()

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:  # noqa: ARG002
        """True at once: other processes are not seen, so `wait` never raises because of them."""
        return lambda: True


_CODES: Final = {verb: code for code, verb in enumerate(DID_NAMES) if code}
_TO_A_PEER: Final = frozenset({*ROOTED, "send", "recv"})
_MOST: Final = 0xFFFFFFFF


class Recorder:
    """Numbers and writes down the operations of one rank in one group. One thread at a time.

    Attributes:
        numbers: u32: of the rank's last collective, of its last sends to each rank, of its last
            receipts from each rank. The C extension counts in them, too.
    """

    def __init__(self, watch: Watch, group: str, world_size: int) -> None:
        """Write to the history of ``watch``, in the name of ``group``."""
        self._watch = watch
        self._group = group
        self._world_size = world_size
        self.numbers = array("I", [0]) * (1 + 2 * world_size)

    def begin(self, operation: Operation) -> int:
        """Stamp ``operation`` on the board and write it down; the entry, for `Watch.record_end`.

        Of one in the background, ``ended`` is set.
        """
        verb, peer, place = operation.verb, operation.peer, 0
        if verb == "send":
            place = 1 + peer
        elif verb == "recv":
            place = 1 + self._world_size + peer
        number = self.numbers[place] = (self.numbers[place] + 1) & _MOST
        tensor = operation.buffer
        entry = self._watch.record_begin(
            operation.name,
            self._group,
            _CODES[verb],
            tensor.nbytes,
            number,
            peer if verb in _TO_A_PEER else NO_PEER,
            0 if tensor is NO_TENSOR else DTYPE_CODES.get(tensor.dtype, 0),
        )
        if operation.background:
            operation.ended = lambda error: self._watch.record_end(entry, error)
        return entry

    def begin_nothing(self, verb: str, name: str) -> int:
        """As `begin`, of an operation of one rank, or of no tensors."""
        number = self.numbers[0] = (self.numbers[0] + 1) & _MOST
        return self._watch.record_begin(name, self._group, _CODES[verb], 0, number)
