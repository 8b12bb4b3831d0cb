"""The short way to the collectives of plain tensors, through the C extension.

The checks and preparations that `device_comm.communicator` does in Python for every call cost ten
times as much as moving a kilobyte. So the extension is tried first: it handles calls that need none
of that, and leaves the others, wrong ones included, to the Python path. It returns the result,
NotImplemented, or Ellipsis: begun, and blocked. If only the strides of an input prevent it, it is
tried again with a contiguous copy, which the Python path would make as well.

While a profiler records, all calls take the Python path, which makes a range for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler

from device_comm._native import Comm
from device_comm.operation import Operation, Verb
from device_comm.shm.collectives import Collective, Executors, GroupMembership
from device_comm.shm.transfers import PeerPipes, ReceiveTask, SendTask
from device_comm.verbs.checks import materialized
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError
from shm_broadcast.state.flight_recorder import outcome_of

if TYPE_CHECKING:
    from device_comm.backend import Identity
    from device_comm.watch import Recorder
    from shm_broadcast.executor import Task


FAST_PATH_VERBS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
"""Those that the extension knows; `device_comm/native/direct.h` says what each is given."""

_OF_ANY_STRIDES = ("all_reduce", "reduce")
"""Those in which it is but the strides of the input that the extension cannot take."""


class FastPathCalls:
    """The calls of one rank that the extension takes; a `device_comm.backend.FastPath`."""

    def __init__(
        self,
        native: Comm,
        membership: GroupMembership,
        pipes: PeerPipes,
        execution: Executors,
        identity: Identity,
        recorder: Recorder,
    ) -> None:
        """Ask ``native`` first; messages go through ``pipes``."""
        self._native = native
        self._calls: dict[str, Any] = {verb: getattr(native, verb) for verb in FAST_PATH_VERBS}
        self._membership = membership
        self._pipes = pipes
        self._execution = execution
        self._collectives = execution.collectives
        self._identity = identity
        self._recorder = recorder

    def collective(self, verb: Verb, timeout: float | Deadline | None, *arguments: Any) -> Any:
        """As `FastPath.collective`."""
        if profiler._is_profiler_enabled:
            return NotImplemented
        if timeout is not None and not _is_duration(timeout):
            return NotImplemented
        if self._collectives.handles:
            return NotImplemented
        try:
            result = self._calls[verb](*arguments)
            if result is NotImplemented and verb in _OF_ANY_STRIDES:
                x, out = arguments[0], arguments[-1]
                if out is not x and _is_strided(x):
                    result = self._calls[verb](materialized(x), *arguments[1:])
            return self._finish(verb, timeout) if result is ... else result
        except BaseException as error:
            # Also where a signal handler raises as soon as the extension returns.
            if self._native.under_way:
                self._native.give_up(outcome_of(error))
                self._execution.fail(error)
            self._identity.name_globally(error)
            raise

    def message(self, verb: Verb, timeout: float | Deadline | None, x: Tensor, peer: int) -> Any:
        """As `FastPath.message`."""
        if profiler._is_profiler_enabled:
            return NotImplemented
        # True and 1.0 would be found for 1.
        lane = self._execution.messages.get((verb, peer)) if type(peer) is int else None
        if timeout is not None and not _is_duration(timeout):
            return NotImplemented
        if lane is None or lane.handles:
            return NotImplemented
        try:
            # There was a lane, so there was a transfer, and there is a pipe.
            if verb == "send":
                moved = self._native.send(x, self._pipes.outgoing[peer].mover, peer)
            else:
                moved = self._native.recv(x, self._pipes.coming[peer].mover, peer)
            return self._go_on(verb, timeout, x, peer, moved) if type(moved) is int else moved
        except BaseException as error:
            if self._native.halfway or isinstance(error, CoordinatorError):
                self._execution.fail(error)
            raise

    def _finish(self, verb: Verb, timeout: float | Deadline | None) -> Any:
        """Wait for the call that is blocked in the extension, and return its result."""
        operation = self._operation(verb, timeout)
        task = Collective(self._native, self._membership, operation.name, iter(()), begun=True)
        self._execution.submit(self._collectives, task, operation)
        return self._native.finish()

    def _go_on(
        self, verb: Verb, timeout: float | Deadline | None, x: Tensor, peer: int, moved: int
    ) -> None:
        """Send or receive what follows the first ``moved`` bytes of ``x``."""
        operation, watch = self._operation(verb, timeout), self._identity.watch
        operation.source, operation.peer = x, peer
        watch.check(operation.name)
        entry = self._recorder.begin(operation)
        task: Task
        if verb == "send":
            task = SendTask(self._pipes, peer, operation.name, x, moved)
        else:
            task = ReceiveTask(self._pipes, peer, operation.name, (x,), received=moved)
        try:
            self._execution.submit(self._execution.messages[verb, peer], task, operation)
        except BaseException as error:
            watch.record_end(entry, error)
            raise
        finally:
            watch.idle()
        watch.record_end(entry)

    def _operation(self, verb: Verb, timeout: float | Deadline | None) -> Operation:
        allowed = self._identity.timeout if timeout is None else timeout
        return Operation(verb, timeout=allowed, name=self._identity.operation(verb))


def _is_duration(timeout: object) -> bool:
    """Whether it can be waited so long: a number may be negative, or none."""
    return isinstance(timeout, Deadline) or (type(timeout) in (float, int) and timeout >= 0)  # type: ignore[operator]


def _is_strided(x: object) -> bool:
    """Whether ``x`` is a dense tensor whose elements do not lie one after the other."""
    return type(x) is torch.Tensor and x.layout is torch.strided and not x.is_contiguous()
