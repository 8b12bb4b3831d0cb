"""Watch a group's board for communicators, and record their operations on it.

`Watch` is the interface of `shm_broadcast.Board`. `LoneWatch` is for a communicator without a
board: it has deadlines and this process's own aborts, and does not observe its peers.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
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
"""Longest sleep between two calls of ``ready``, in seconds."""


class Watch(Protocol):
    """The deadlines, aborts and peers of a group: the interface of `shm_broadcast.Board`."""

    @property
    def member(self) -> int | None:
        """Return this process's member number."""

    @property
    def aborted(self) -> Failure | None:
        """Return the first reported failure, or None."""

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
        """Record that this member begins ``operation``; return its sequence number."""

    def record_end(self, sequence: int, error: BaseException | None = None) -> None:
        """Record in the flight recorder how the operation ended."""

    def member_status(self, member: int) -> MemberStatus:
        """Return the last known operation of ``member``."""

    def idle(self) -> None:
        """Publish that this member's operation has ended."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` if the group was aborted."""

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Report a failure: every waiting member raises `GroupAbortedError`.

        ``culprit`` is the failed member's number; None: this member's.
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

        ``peers`` returns the numbers of the awaited members. ``ready`` is called at least every
        ``poll`` seconds, and after `notify`. Sleep begins after ``spin`` seconds.
        """

    def notify(self, member: int) -> None:
        """Wake ``member`` if it sleeps in `wait`."""

    def published_wait(
        self, operation: str
    ) -> AbstractContextManager[Callable[[Iterable[int]], None]]:
        """Publish a wait that does not use `wait`, for a ``with`` block.

        The context is a function to call with the awaited members.
        """

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Report a broken connection with one of ``members``.

        Returns:
            A function; it returns True once `wait` for them would have raised for a lost one.
        """


class LoneWatch:
    """A `Watch` without a board, which observes only this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure: Failure | None = None
        self._is_forked_child = False
        self._bell = threading.Event()
        call_in_forked_children(self)

    @property
    def member(self) -> int:
        """Return this process's rank in its group."""
        return self._rank

    @property
    def aborted(self) -> Failure | None:
        """Return the failure that this process reported, or None."""
        return self._failure

    def record_begin(
        self,
        operation: str,  # noqa: ARG002 - no board
        group: str = "",  # noqa: ARG002
        verb: int = 0,  # noqa: ARG002
        size: int = 0,  # noqa: ARG002
        number: int = 0,  # noqa: ARG002
        peer: int = NO_PEER,  # noqa: ARG002
        dtype: int = 0,  # noqa: ARG002
    ) -> int:
        """Do nothing: there is no board."""
        return 0

    def record_end(self, sequence: int, error: BaseException | None = None) -> None:
        """Do nothing: there is no board."""

    def member_status(self, member: int) -> MemberStatus:
        """Return ``"absent"``: other processes are not observed."""
        return MemberStatus(member, 0, "absent")

    def idle(self) -> None:
        """Do nothing: there is no board."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` after `abort`, `GroupClosedError` in a forked child."""
        self._refuse_child(operation)
        if self._failure is not None:
            raise GroupAbortedError(operation, self._failure)

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Store the first failure and wake this process's waiting thread.

        Raises:
            GroupClosedError: in a forked child.
        """
        self._refuse_child("abort")
        if self._failure is None:
            failed = self._rank if culprit is None else culprit
            self._failure = Failure(self._rank, *kind_and_message(error), failed)
        self._bell.set()

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],  # noqa: ARG002 - not observed
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
        """Disable the watch in a forked child: the group is its parent's."""
        self._is_forked_child = True

    def notify(self, member: int) -> None:  # noqa: ARG002 - a single member
        """Wake this process's waiting thread."""
        self._bell.set()

    def published_wait(
        self,
        operation: str,  # noqa: ARG002 - no board
    ) -> AbstractContextManager[Callable[[Iterable[int]], None]]:
        """Do nothing: there is no board."""
        return nullcontext(lambda _: None)

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:  # noqa: ARG002
        """Return a function that returns True: `wait` never raises for a peer."""
        return lambda: True


_CODES: Final = {verb: code for code, verb in enumerate(DID_NAMES) if code}
_TO_A_PEER: Final = frozenset({*ROOTED, "send", "recv"})
_MOST: Final = 0xFFFFFFFF


class Recorder:
    """Numbers and records the operations of one rank in one group. One thread at a time.

    Attributes:
        numbers: u32: the last collective, then per rank the last send, then per rank the last
            receive. The C extension increments them as well.
    """

    def __init__(self, watch: Watch, group: str, world_size: int) -> None:
        self._watch = watch
        self._group = group
        self._world_size = world_size
        self.numbers = array("I", [0]) * (1 + 2 * world_size)

    def begin(self, operation: Operation) -> int:
        """Record ``operation``; return its entry for `Watch.record_end`.

        Sets ``ended`` of a background operation.
        """
        verb, peer, index = operation.verb, operation.peer, 0
        if verb == "send":
            index = 1 + peer
        elif verb == "recv":
            index = 1 + self._world_size + peer
        number = self.numbers[index] = (self.numbers[index] + 1) & _MOST
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
        """Record an operation of one rank, or without tensors; return its entry."""
        number = self.numbers[0] = (self.numbers[0] + 1) & _MOST
        return self._watch.record_begin(name, self._group, _CODES[verb], 0, number)
