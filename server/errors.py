"""The errors of a pool of workers.

    CoordinatorError
    ├── WorkerError                         a worker's method raised; carries its traceback
    ├── CallRefusedError                    a worker's method raises it to refuse a call cleanly
    ├── StreamLostError                     a stream began before the pool was restarted
    ├── RestartLimitError                   the pool broke too often to be restarted again
    ├── DivergenceError
    │   └── CallDivergedError               ranks began different operations in a call; names them
    ├── WorkerLostError (ConnectionError)   a worker's process ended; names rank, pid and signal
    ├── HostError                           a host did not connect, or was lost; names it
    ├── DescriptorLimitError (OSError)      the limit of open files is too low; has the need
    ├── ProcessLimitError (OSError)         the limit of processes and threads is too low
    ├── WorkerStartError                    a worker did not start; the pool does not exist
    ├── GroupTimeoutError (TimeoutError)
    │   └── CallTimeoutError                a call timed out; carries the stacks of the late ranks
    │       └── CallStuckError              no call was answered for long, and the pool broke
    ├── GroupClosedError
    │   └── PoolClosedError                 the pool was shut down
    └── QueueFullError                      too many items wait already; try again later

A failure breaks the pool unless every rank has answered and no group operation is incomplete: in
each group all members began the same operations, and received all messages. A pool that is not
restarted raises that failure again from every later call, with a note.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from traceback import clear_frames
from typing import Any, TypeVar, cast

from shm_broadcast.errors import (
    CoordinatorError,
    DivergenceError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
)

E = TypeVar("E", bound=BaseException)


class WorkerError(CoordinatorError):
    """A worker's method raised.

    ``__cause__`` is the exception itself where it can be pickled.

    Attributes:
        rank: the worker's global rank.
        method: the name of the method.
        kind: the name of the exception's class, with its module unless it is built in.
        message: the exception's text.
        traceback: the worker's traceback; may be ``""``.
    """

    def __init__(self, rank: int, method: str, kind: str, message: str, traceback: str) -> None:
        self.rank = rank
        self.method = method
        self.kind = kind
        self.message = message
        self.traceback = traceback
        super().__init__(f"rank {rank} failed in {method}: {kind}: {message}")
        if traceback:
            self.add_note(f"Traceback of rank {rank}:\n{traceback.rstrip()}")


class CallRefusedError(CoordinatorError):
    """A worker's method raises it to refuse a call before other ranks wait for it.

    First, the method must notify ranks that would wait. A pipeline stage, for example, sends a
    notice to the next stage instead of its result; that stage forwards it, and raises this error
    too. The caller gets its ``__cause__`` (``raise CallRefusedError from error``). The pool stays
    usable, as after every failure that leaves no group operation incomplete.

    Attributes:
        rank: the global rank that refused, if this rank only forwards its notice; else ``None``.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__("refused" if rank is None else f"rank {rank} has refused the call")


class CallDivergedError(DivergenceError):
    """Ranks began different group operations in a call: its results and all later ones are invalid.

    If a process ended in such an operation, ``__cause__`` is its `WorkerLostError`.

    Attributes:
        number: the call's number, counted from 1.
        method: the method that was called.
        group: the name of the group in which two ranks differ.
        ranks: the global ranks of the two.
        did: the operation that each of them began in the group, as text.
    """

    def __init__(
        self,
        number: int,
        method: str,
        group: str,
        ranks: tuple[int, int],
        did: tuple[str, str],
    ) -> None:
        super().__init__(ranks[1], *did)
        self.number = number
        self.method = method
        self.group = group
        self.ranks = ranks
        self.did = did
        self.args = (
            f"call {number} ({method}): in group {group}, rank {ranks[0]} {did[0]} where "
            f"rank {ranks[1]} {did[1]}",
        )


class WorkerLostError(CoordinatorError, ConnectionError):
    """A worker's process ended while the pool was in use.

    Attributes:
        rank: the worker's global rank.
        pid: its process id.
        end: the kind of end, such as ``"killed by SIGKILL"`` or ``"exit status 3"``.
        stack: its Python stacks at a crash, if the interpreter could write them; or the traceback
            of an exception between calls.
    """

    def __init__(self, rank: int, pid: int, end: str, stack: str = "") -> None:
        self.rank = rank
        self.pid = pid
        self.end = end
        self.stack = stack
        super().__init__(f"lost the worker of rank {rank} (pid {pid}): {end}")
        if stack:
            self.add_note(f"Last stack of rank {rank}:\n{stack.rstrip()}")


class WorkerStartError(CoordinatorError):
    """A worker did not start, so the pool was not made; all its processes have ended.

    Attributes:
        rank: the first worker that failed; of late workers, one that blocks others.
        reason: the failure, as text.
        traceback: the worker's traceback or stack; may be ``""``.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        super().__init__(f"the worker of rank {rank} did not start: {reason}")
        if traceback:
            self.add_note(f"From rank {rank}:\n{traceback.rstrip()}")


class CallTimeoutError(GroupTimeoutError):
    """A call timed out. The pool is intact; the late workers continue the call.

    Its notes show the stacks of the ranks that block others, or all stacks if none of these
    ranks has one.

    Attributes:
        method: the method that was called.
        stacks: the Python stack of each worker that had not answered, by rank.
        blocked_by: the ranks that block other ranks and wait for no rank themselves, such as a
            stopped process or a rank that does not call a collective; or ranks that wait for
            each other. Empty if none was detected.
    """

    def __init__(
        self,
        method: str,
        timeout: float | None,
        waiting_for: tuple[MemberStatus, ...] = (),
        detail: str = "",
        stacks: Mapping[int, str] | None = None,
        blocked_by: tuple[int, ...] = (),
    ) -> None:
        super().__init__(method, timeout, waiting_for, detail)
        self.method = method
        self.blocked_by = blocked_by
        self.stacks = dict(stacks or {})
        culprits = {rank: self.stacks[rank] for rank in blocked_by if rank in self.stacks}
        ranks_in: dict[str, list[str]] = {}
        for rank, stack in (culprits or self.stacks).items():
            ranks_in.setdefault(stack.rstrip(), []).append(f"rank {rank}")
        for stack, ranks in ranks_in.items():
            self.add_note(f"Stack of {' and '.join(ranks)}:\n{stack}")


class CallStuckError(CallTimeoutError):
    """The workers did not answer their oldest call for ``stuck_after`` seconds.

    Unlike after a `CallTimeoutError`, the pool breaks; it restarts with ``restart=``.
    """


class StreamLostError(CoordinatorError):
    """A stream cannot go on: its generators ended when the pool was restarted.

    Attributes:
        method: the method that began the stream.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        super().__init__(f"{method}: the stream ended when the pool was restarted")


class HostError(CoordinatorError):
    """A host of a pool over several did not connect, was refused, or is lost.

    Attributes:
        node: its number; on a host that has lost the head, its own.
        reason: the failure, as text.
        absent: whether it did not connect in time.
    """

    def __init__(self, node: int, reason: str, *, absent: bool = False) -> None:
        self.node = node
        self.reason = reason
        self.absent = absent
        super().__init__(reason)


class DescriptorLimitError(CoordinatorError, OSError):
    """A pool or a service needs more open files than this process may have. ``errno`` is EMFILE.

    Attributes:
        limit: RLIMIT_NOFILE, ``ulimit -n``.
        needed: an estimate of the need, including all other files of the process.
    """

    def __init__(self, limit: int, needed: int) -> None:
        self.limit = limit
        self.needed = needed
        super().__init__(
            f"this process may have {limit} files open (RLIMIT_NOFILE, ulimit -n), and needs about "
            f"{needed}"
        )
        self.errno = errno.EMFILE


class ProcessLimitError(CoordinatorError, OSError):
    """A pool could start no further process or thread. ``errno`` is EAGAIN.

    Attributes:
        limit: RLIMIT_NPROC of the user, ``ulimit -u``; -1: no limit. A control group may have a
            lower one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        user = "any number" if limit < 0 else str(limit)
        super().__init__(
            f"no further process or thread can be started: this user may have {user} of them "
            "(RLIMIT_NPROC, ulimit -u), and its container has a limit of its own (pids.max)"
        )
        self.errno = errno.EAGAIN


class RestartLimitError(CoordinatorError):
    """A pool broke after its last permitted restart. ``__cause__`` is the last failure.

    Attributes:
        restarts: the restarts within ``window``, or consecutive ones without an answered call.
        window: seconds.
        failure: the text of the last failure.
    """

    def __init__(self, restarts: int, window: float, failure: str) -> None:
        self.restarts = restarts
        self.window = window
        self.failure = failure
        super().__init__(
            f"the pool has broken again after {restarts} restarts within {window:g} s, or in a row "
            f"without an answered call, the most that max_restarts allows: {failure}"
        )


class QueueFullError(CoordinatorError):
    """A request was refused at once: with it, too many items would wait.

    Attributes:
        asked: the number of items in the request.
        waiting: the number of items that wait.
        limit: the number of items that may wait.
    """

    def __init__(self, asked: int, waiting: int, limit: int) -> None:
        self.asked = asked
        self.waiting = waiting
        self.limit = limit
        super().__init__(f"no room for {asked} more: {waiting} of at most {limit} wait already")


class PoolClosedError(GroupClosedError):
    """The pool was shut down, before the call or during it."""


def again(error: E, note: str = "") -> E:
    """Return a copy of ``error`` without traceback, to raise once more.

    Raising the same object again would extend its traceback, which keeps frames alive.

    Args:
        error: the error; returned itself if it is not a `CoordinatorError`.
        note: a note to add to the copy; ``""``: none.
    """
    if not isinstance(error, CoordinatorError):
        return error
    reduced = cast("tuple[Any, ...]", error.__reduce__())
    copy: E = reduced[0](*reduced[1])
    copy.args = error.args  # `located` may have changed them
    vars(copy).update({name: value for name, value in vars(error).items() if name != "__notes__"})
    copy.__cause__ = error.__cause__
    for each in (*getattr(error, "__notes__", ()), note):
        if each and each not in getattr(copy, "__notes__", ()):
            copy.add_note(each)
    return copy


def free_frames(error: BaseException) -> None:
    """Clear the local variables of all frames in an error's tracebacks, causes included."""
    chain = [error]
    for each in chain:
        clear_frames(each.__traceback__)
        before = (each.__cause__, each.__context__)
        chain += [each for each in before if each is not None and each not in chain]


def located(error: E, pool: str) -> E:
    """Prefix the text of ``error`` with the name of its pool, and return it.

    An empty name, or an error that is no `CoordinatorError`, changes nothing.
    """
    where = f"{pool}: "
    if pool and isinstance(error, CoordinatorError) and where not in str(error):
        error.args = (f"{where}{error}",)
    return error


def with_notes(error: BaseException) -> str:
    """Return the error's text and its notes, which hold stacks and tracebacks of workers."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
