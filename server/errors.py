"""Everything that can go wrong with a pool of workers, on one screen.

    CoordinatorError
    ├── WorkerError                         a worker's method raised; carries its traceback
    ├── CallRefusedError                    what a worker's method raises to refuse a call in order
    ├── WorkerLostError (ConnectionError)   a worker's process ended; names rank, pid and signal
    ├── WorkerStartError                    a worker did not come up; the pool does not exist
    ├── GroupTimeoutError (TimeoutError)
    │   └── CallTimeoutError                a call's time passed; carries the stacks of the late
    ├── GroupClosedError
    │   └── PoolClosedError                 you shut the pool down
    └── QueueFullError                      too much waits already; try again later

The first failure breaks a pool unless every rank answered and none left a group operation half
done: all began equally many of them, or those that failed raised `CallRefusedError`. A broken pool
raises that first failure again from every later call, with a note that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from shm_broadcast.errors import CoordinatorError, GroupClosedError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shm_broadcast.errors import MemberStatus


class WorkerError(CoordinatorError):
    """A worker's method raised.

    ``__cause__`` is the exception itself where it can be pickled.

    Attributes:
        rank: the worker's global rank.
        method: what was called.
        kind: the name of the exception's class, with its module unless it is built in.
        message: the exception's text.
        traceback: the traceback as the worker saw it.
    """

    def __init__(self, rank: int, method: str, kind: str, message: str, traceback: str) -> None:
        self.rank = rank
        self.method = method
        self.kind = kind
        self.message = message
        self.traceback = traceback
        super().__init__(f"rank {rank} failed in {method}: {kind}: {message}")
        self.add_note(f"Traceback of rank {rank}:\n{traceback.rstrip()}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.method, self.kind, self.message, self.traceback)


class CallRefusedError(CoordinatorError):
    """Raised by a worker's method: this call cannot be done, and no rank waits for this one.

    A method that raises it vouches that it has begun no group operation which another rank has not,
    or that it has told the ranks that would wait. A stage of a pipeline tells the next one instead
    of sending its result; that one tells the next, and raises this too. The pool then goes on, and
    the caller gets the exception that this one was raised from.

    Attributes:
        rank: the global rank that refused, where this one passes its word on.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__("refused" if rank is None else f"rank {rank} has refused the call")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank,)


class WorkerLostError(CoordinatorError, ConnectionError):
    """A worker's process ended while the pool was in use.

    Attributes:
        rank: the worker's global rank.
        pid: its process id.
        end: how it ended, such as ``"killed by SIGKILL"`` or ``"exit status 3"``.
        stack: its Python stacks when it crashed, where the interpreter could still write them.
    """

    def __init__(self, rank: int, pid: int, end: str, stack: str = "") -> None:
        self.rank = rank
        self.pid = pid
        self.end = end
        self.stack = stack
        super().__init__(f"lost the worker of rank {rank} (pid {pid}): {end}")
        if stack:
            self.add_note(f"Last stack of rank {rank}:\n{stack.rstrip()}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.pid, self.end, self.stack)


class WorkerStartError(CoordinatorError):
    """A worker did not come up, so the pool was not made; nothing of it is left.

    Attributes:
        rank: the first worker that failed, or that was late.
        reason: what happened to it.
        traceback: its traceback or stack; ``""`` where there is none.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        super().__init__(f"the worker of rank {rank} did not start: {reason}")
        if traceback:
            self.add_note(f"From rank {rank}:\n{traceback.rstrip()}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.reason, self.traceback)


class CallTimeoutError(GroupTimeoutError):
    """A call's time passed. The pool is intact; the late workers go on with the call.

    Attributes:
        method: what was called.
        stacks: the Python stack of each worker that had not answered, by rank.
    """

    def __init__(
        self,
        method: str,
        timeout: float | None,
        waiting_for: tuple[MemberStatus, ...] = (),
        detail: str = "",
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(method, timeout, waiting_for, detail)
        self.method = method
        self.stacks = dict(stacks or {})
        for rank, stack in self.stacks.items():
            self.add_note(f"Stack of rank {rank}:\n{stack.rstrip()}")

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.method, self.timeout, self.waiting_for, self.detail, self.stacks)
        return type(self), arguments


class QueueFullError(CoordinatorError):
    """A request was refused at once: what waits already leaves no room for it.

    Attributes:
        asked: items in the request.
        waiting: items that wait.
        limit: items that may wait.
    """

    def __init__(self, asked: int, waiting: int, limit: int) -> None:
        self.asked = asked
        self.waiting = waiting
        self.limit = limit
        super().__init__(f"no room for {asked} more: {waiting} of at most {limit} wait already")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.asked, self.waiting, self.limit)


class PoolClosedError(GroupClosedError):
    """The pool was shut down, before the call or during it."""


def again(error: BaseException, note: str = "") -> BaseException:
    """A copy of ``error`` to raise once more, so that tracebacks do not pile up on one object.

    Args:
        error: an error; one that is not this project's is returned itself.
        note: added to the copy.
    """
    if not isinstance(error, CoordinatorError):
        return error
    reduced = cast("tuple[Any, ...]", error.__reduce__())
    copy: BaseException = reduced[0](*reduced[1])
    copy.__cause__ = error.__cause__
    if note:
        copy.add_note(note)
    return copy
