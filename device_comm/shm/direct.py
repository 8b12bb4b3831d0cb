"""Run simple calls on the fast path: one call of the C extension.

The checks of `device_comm.communicator` cost ten times as much as moving a kilobyte, so the
extension is called first. It returns the result, or NotImplemented, without side effects, for all
other calls, which take the slow path. It returns Ellipsis for a call that has begun and is blocked.

While a profiler records, all calls take the slow path, which records a range for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler

from device_comm._native import Comm
from device_comm.operation import NO_TENSOR, Operation, Verb
from device_comm.shm.collectives import Collective, Executors, GroupMembership
from device_comm.shm.transfers import PeerPipes, ReceiveTask, SendTask
from device_comm.verbs.checks import materialized
from device_comm.work import Work
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
"""The extension's collectives; `device_comm/_native.pyi` has their signatures."""

_OF_ANY_STRIDES = ("all_reduce", "reduce")
"""Verbs that are retried with a contiguous copy of a strided input."""


class FastPathCalls:
    """The fast path of one rank; a `device_comm.backend.FastPath`."""

    def __init__(
        self,
        native: Comm,
        membership: GroupMembership,
        pipes: PeerPipes,
        execution: Executors,
        identity: Identity,
        recorder: Recorder,
    ) -> None:
        self._native = native
        self._calls: dict[str, Any] = {verb: getattr(native, verb) for verb in FAST_PATH_VERBS}
        self._membership = membership
        self._pipes = pipes
        self._execution = execution
        self._collectives = execution.collectives
        self._identity = identity
        self._recorder = recorder

    def collective(
        self, verb: Verb, timeout: float | Deadline | None, background: bool, *arguments: Any
    ) -> Any:
        """Run a collective: see `FastPath.collective`."""
        if profiler._is_profiler_enabled:
            return NotImplemented
        if timeout is not None and not _is_duration(timeout):
            return NotImplemented
        if self._collectives.handles:
            return NotImplemented
        given = (*arguments, True) if background else arguments
        try:
            result = self._calls[verb](*given)
            if result is NotImplemented and verb in _OF_ANY_STRIDES:
                x, out = arguments[0], arguments[-1]
                if out is not x and _is_strided(x):
                    result = self._calls[verb](materialized(x), *given[1:])
            if background:
                return result if result is NotImplemented else self._work(verb, timeout, result)
            return self._finish(verb, timeout) if result is ... else result
        except BaseException as error:
            # The error may be a signal handler's, raised as soon as the extension returns.
            if self._native.under_way:
                self._fail(error)
            self._identity.name_globally(error)
            raise

    def message(
        self, verb: Verb, timeout: float | Deadline | None, background: bool, x: Tensor, peer: int
    ) -> Any:
        """Run a send or recv: see `FastPath.message`."""
        if profiler._is_profiler_enabled:
            return NotImplemented
        # True and 1.0 are equal to the key 1.
        executor = self._execution.messages.get((verb, peer)) if type(peer) is int else None
        if timeout is not None and not _is_duration(timeout):
            return NotImplemented
        if executor is None or executor.handles:
            return NotImplemented
        try:
            # An executor implies an earlier transfer, which made the channel.
            if verb == "send":
                result = None
                moved = self._native.send(x, self._pipes.outgoing[peer].mover, peer)
            else:
                result = x
                moved = self._native.recv(x, self._pipes.coming[peer].mover, peer, background)
            if moved is None:
                return Work(result) if background else result
            if moved is NotImplemented:
                return NotImplemented
            return self._go_on(verb, timeout, background, x, peer, moved, result)
        except BaseException as error:
            if self._native.halfway or isinstance(error, CoordinatorError):
                self._execution.fail(error)
            raise

    def _work(self, verb: Verb, timeout: float | Deadline | None, result: Any) -> Work[Any]:
        if not self._native.under_way:
            return Work(result)
        operation = self._operation(verb, timeout, True)
        task = Collective(self._native, self._membership, operation, begun=True)
        handle = self._collectives.follow(task, self._ended)
        return Work(result, handle, None, operation.timeout, None, self._fail)

    def _fail(self, error: BaseException) -> None:
        self._native.give_up(outcome_of(error))
        self._execution.fail(error)

    def _ended(self, error: CoordinatorError | None) -> None:
        if error is None:
            self._native.finish()
        else:
            self._native.give_up(outcome_of(error))

    def _finish(self, verb: Verb, timeout: float | Deadline | None) -> Any:
        operation = self._operation(verb, timeout)
        task = Collective(self._native, self._membership, operation, begun=True)
        self._execution.submit(self._collectives, task, operation)
        return self._native.finish()

    def _go_on(
        self,
        verb: Verb,
        timeout: float | Deadline | None,
        background: bool,
        x: Tensor,
        peer: int,
        moved: int,
        result: Tensor | None,
    ) -> Any:
        """Send or receive what follows the first ``moved`` bytes of ``x``."""
        watch = self._identity.watch
        operation = self._operation(verb, timeout, background, x, peer)
        watch.check(operation.name)
        entry = self._recorder.begin(operation)

        def fail(error: BaseException) -> None:
            watch.record_end(entry, error)
            self._execution.fail(error)

        task: Task
        if verb == "send":
            task = SendTask(self._pipes, peer, operation.name, x, moved)
        else:
            task = ReceiveTask(self._pipes, peer, operation.name, (x,), received=moved)
        try:
            executor = self._execution.messages[verb, peer]
            handle = self._execution.submit(executor, task, operation)
        except BaseException as error:
            watch.record_end(entry, error)
            raise
        finally:
            watch.idle()
        if handle is not None:
            return Work(result, handle, None, operation.timeout, None, fail)
        watch.record_end(entry)
        return Work(result) if background else result

    def _operation(
        self,
        verb: Verb,
        timeout: float | Deadline | None,
        background: bool = False,
        x: Tensor = NO_TENSOR,
        peer: int = 0,
    ) -> Operation:
        identity = self._identity
        allowed = identity.timeout if timeout is None else timeout
        operation = Operation(verb, x, NO_TENSOR, background, allowed, peer=peer)
        operation.name = identity.operation(verb)
        return operation


def _is_duration(timeout: object) -> bool:
    """Return True unless the slow path must check the value and raise."""
    return isinstance(timeout, Deadline) or (type(timeout) in (float, int) and timeout >= 0)  # type: ignore[operator]


def _is_strided(x: object) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided and not x.is_contiguous()
