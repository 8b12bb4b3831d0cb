"""Run the operations of all verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.profiler import record_function

from device_comm.call_number import call_number
from device_comm.operation import AnyOp, Operation, Verb
from device_comm.shm.signature import sign, signature_with_sizes
from device_comm.verbs.checks import (
    Shape,
    check_apart,
    check_dim,
    check_out,
    check_rank,
    check_shape,
    check_tensor,
    equal_share,
)
from device_comm.work import Pending, PendingThen, Work, all_pending
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from device_comm.backend import Backend


class Traced(Protocol):
    """Verbs as ops of the graph that `torch.compile` makes, for groups that support it."""

    def all_reduce(self, x: Tensor, op: AnyOp) -> Tensor:
        """See `Collectives.all_reduce`."""

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `Collectives.all_reduce_norm`."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See `Collectives.all_gather`."""

    def reduce_scatter(self, x: Tensor, dim: int, op: AnyOp) -> Tensor:
        """See `Collectives.reduce_scatter`."""


class Runner:
    """Runs the operations of one rank on a backend. One thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.device = backend.device
        self.new = backend.empty
        self._watch = backend.watch
        self._begun = backend.begun
        self._recorder = backend.recorder
        self._in_collective = False
        self._names = {
            verb: backend.identity.operation(verb) for verb in backend.capabilities.verbs
        }

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See `Communicator.empty`."""
        return self.new(check_shape("shape", shape), dtype)

    def run(
        self,
        operation: Operation,
        result: Any,
        finish: Callable[[], Any] | None = None,
        more: Sequence[Operation] = (),
    ) -> Any:
        """Run ``operation``; return ``result``, or the result of ``finish``, or a `Work`.

        An operation that fails midway or times out leaves the ranks out of step, so the error
        aborts the group. So does `RuntimeError`, if another thread is in a collective, or a signal
        handler interrupted one: the owner of the data would be ambiguous. ``more`` has further
        operations of the same call.
        """
        if is_compiling():
            from device_comm.verbs.outside_graph import call_outside_graph  # noqa: PLC0415

            return call_outside_graph(self.run, operation, result, finish, more)
        collective = operation.verb not in ("send", "recv")
        if collective:
            if self._in_collective:  # no call between test and set: no thread switch
                self._refuse(operation)
            self._in_collective = True
        try:
            if profiler._is_profiler_enabled:
                with record_function(self._label(operation)):
                    return self._run(operation, result, finish, more)
            return self._run(operation, result, finish, more)
        finally:
            if collective:
                self._in_collective = False

    def _refuse(self, operation: Operation) -> NoReturn:
        name = self.backend.identity.operation(operation.verb)
        error = RuntimeError(
            f"{name}: another thread is in a call of this group, or one was interrupted"
        )
        self._watch.abort(error)
        self.backend.discard()
        raise error

    def _run(
        self,
        operation: Operation,
        result: Any,
        finish: Callable[[], Any] | None,
        more: Sequence[Operation],
    ) -> Any:
        given, backend = operation.timeout, self.backend
        operation.timeout = backend.timeout if given is None else Deadline.after(given)
        operation.name = self._enter(operation.verb)
        if call_number() and operation.verb not in ("send", "recv"):
            for each in (operation, *more):
                self._begun.add(signature_with_sizes(each))
        entries = [self._recorder.begin(operation)]
        try:
            pending = self._start(operation)
            for each in more:
                each.name, each.timeout = operation.name, operation.deadline
                entries.append(self._recorder.begin(each))
                pending = all_pending([pending, self._start(each)])
            if operation.background and pending is not None:
                allowed = backend.timeout if given is None else given
                done = PendingThen(pending, lambda: self._end(entries))
                keep, failed = (operation, more), lambda error: self._fail(entries, error)
                return Work(result, done, finish, allowed, keep, failed)
            if pending is not None:
                pending.wait(operation.deadline)
        except BaseException as error:
            self._fail(entries, error)
            raise
        finally:
            self._watch.idle()
        for entry in entries:
            self._watch.record_end(entry)
        if operation.background:
            return Work(result, None, finish)
        return result if finish is None else finish()

    def _start(self, operation: Operation) -> Pending | None:
        """Start an operation, unless it moves nothing and the backend compares nothing.

        After an unexpected error this rank is out of step: the group is aborted. Refusals, for
        example of a dtype, happen on all ranks.
        """
        if not self.backend.capabilities.detects_divergence and operation.moves_nothing:
            return None
        try:
            return self.backend.start(operation)
        except (TypeError, ValueError, NotImplementedError, CoordinatorError):
            raise
        except BaseException as error:
            self.backend.fail(error)
            raise

    def skip(self, verb: Verb, result: Any, async_op: bool) -> Any:
        """Record an operation of one rank, or without tensors; return ``result``."""
        self._watch.record_end(self._recorder.begin_nothing(verb, self._enter(verb)))
        self._begun.add(sign(verb))
        self._watch.idle()
        return Work(result) if async_op else result

    def identity(self, verb: Verb, x: Tensor, out: Tensor | None, async_op: bool) -> Any:
        """Return the result of a verb in a group of one: ``x``, or its copy in ``out``."""
        if out is x:
            check_apart(x)
        elif out is not None:
            check_out(out, x.shape, x.dtype, self.device)
            out.detach().copy_(x)
        return self.skip(verb, x if out is None else out, async_op)

    def _enter(self, verb: Verb) -> str:
        """Check that ``verb`` may begin; return its name on the board."""
        name = self._names.get(verb)
        if name is None:
            raise NotImplementedError(
                f"{self.backend.name}: {self.backend.capabilities.backend} has no {verb}"
            )
        if self.backend.closed:
            raise GroupClosedError(f"{name}: this communicator was closed")
        self._watch.check(name)
        return name

    def part(self, x: Tensor, dim: int, index: int) -> Tensor:
        """Return part ``index`` of N of ``x`` along ``dim``, a view; ``x`` itself if N is 1."""
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        if self.world_size == 1:
            return x
        share = equal_share(x.shape[dim], self.world_size, dim)
        return x.detach().narrow(dim, index * share, share)

    def copy_of_part(self, x: Tensor, dim: int, index: int) -> Tensor:
        """Return a copy of a `part`; ``x`` itself if N is 1."""
        part = self.part(x, dim, index)
        return part if part is x else part.clone()

    def check_dst(self, dst: int, out: Tensor | None) -> int:
        """Require a rank of the group, and ``out`` only there; return it as an int."""
        dst = check_rank("dst", dst, self.world_size)
        if out is not None and self.rank != dst:
            raise ValueError(f"out is given on rank {dst} only; this is rank {self.rank}")
        return dst

    def _label(self, operation: Operation) -> str:
        """Return a profiler label, such as ``"group-coordinator all_reduce tp 4096 B"``."""
        size = operation.buffer.nbytes
        return f"group-coordinator {operation.verb} {self.backend.name} {size} B"

    def _end(self, entries: Sequence[int], error: BaseException | None = None) -> None:
        for entry in entries:
            self._watch.record_end(entry, error)

    def _fail(self, entries: Sequence[int], error: BaseException) -> None:
        self._end(entries, error)
        if isinstance(error, CoordinatorError):
            self.backend.fail(error)
