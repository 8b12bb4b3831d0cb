"""Define handles for operations in progress: `Pending` of a backend, `Work` of a caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupTimeoutError

S = TypeVar("S")
T = TypeVar("T")

_AWAIT_PAUSES = (0.0, 0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
"""Seconds between two polls of an `await`; the last one repeats."""


class Pending(Protocol):
    """An operation that a backend has begun. It keeps its tensors alive."""

    def ready(self) -> bool:
        """Return True if `wait` would return or raise at once. Never blocks."""

    def wait(self, deadline: Deadline) -> object:
        """Return once the operation is done.

        Raises:
            GroupTimeoutError: incomplete at ``deadline``; it continues.
            CoordinatorError: it failed.
        """


class AllPending:
    """Several operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def ready(self) -> bool:
        """Return True if all are ready."""
        return all(part.ready() for part in self._parts)

    def wait(self, deadline: Deadline) -> None:
        """Wait for all operations, in order of their start."""
        for part in self._parts:
            part.wait(deadline)


def all_pending(parts: Sequence[Pending | None]) -> Pending | None:
    """Return one `Pending` for all that are not done; None if all are done."""
    open_parts = [part for part in parts if part is not None]
    return AllPending(open_parts) if open_parts else None


class PendingThen:
    """An operation with a step that runs in the first successful `wait`."""

    def __init__(self, pending: Pending, step: Callable[[], object]) -> None:
        self._pending = pending
        self._step: Callable[[], object] | None = step

    def ready(self) -> bool:
        """Return True if the operation is done."""
        return self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        """Wait for the operation, then run the step once."""
        self._pending.wait(deadline)
        if self._step is not None:
            self._step()
            self._step = None


class Work(Generic[T]):
    """A handle on an operation begun with ``async_op=True``. One thread at a time.

    It keeps every tensor of the operation alive. It may be dropped: the operation continues, and
    its result must not be read. Until `wait` returns, inputs must not change and the result must
    not be read.
    """

    __slots__ = ("_error", "_failed", "_finish", "_keep", "_pending", "_result", "_timeout")

    def __init__(
        self,
        result: T,
        pending: Pending | None = None,
        finish: Callable[[], T] | None = None,
        timeout: float | Deadline | None = None,
        keep: object = None,
        failed: Callable[[CoordinatorError], None] | None = None,
    ) -> None:
        """Wrap an operation; ``pending`` is None if it is done.

        Args:
            result: the result of `wait`, unless ``finish`` returns it.
            finish: called by the first `wait` after the operation is done, and again only after a
                GroupTimeoutError of its own; returns the result.
            keep: further objects to keep alive during the operation.
            failed: called once with the error if the operation fails.
        """
        self._result = result
        self._pending = pending
        self._finish = finish
        self._timeout = timeout
        self._keep = keep
        self._failed = failed
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise at once."""
        return self._pending is None or self._error is not None or self._pending.ready()

    ready = is_completed
    """Makes a `Work` a `Pending`, which another `Work` can wait for."""

    def wait(self, timeout: float | Deadline | None = None) -> T:
        """Wait for the operation and return its result; repeated calls return the same.

        ``timeout`` is in seconds from now; None: the operation's.

        Raises:
            GroupTimeoutError: incomplete; it continues, wait again.
            CoordinatorError: it failed. Each further call raises the same error, also any other
                error of ``finish``.
        """
        if self._error is not None:
            raise self._error
        if self._pending is not None:
            deadline = Deadline.after(self._timeout if timeout is None else timeout)
            try:
                self._pending.wait(deadline)
            except GroupTimeoutError:
                raise
            except CoordinatorError as error:
                self._error = error
                if self._failed is not None:
                    self._failed(error)
                raise
            self._pending = None
        if self._finish is not None:
            try:
                self._result = self._finish()
            except GroupTimeoutError:
                raise
            except Exception as error:
                self._error, self._finish, self._keep = error, None, None
                raise
            self._finish = None
        self._keep = None
        return self._result

    def then(self, step: Callable[[T], S]) -> Work[S]:
        """Return a work whose result is ``step(self.wait())``."""
        work: Work[Any] = Work(None, self, lambda: step(self.wait()), self._timeout)
        return work

    def __await__(self) -> Generator[object, None, T]:
        """Wait as `wait` does, without blocking the event loop."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        deadline = Deadline.after(self._timeout)
        polls = 0
        while not self.is_completed():
            await asyncio.sleep(_AWAIT_PAUSES[min(polls, len(_AWAIT_PAUSES) - 1)])
            polls += 1
            if polls % len(_AWAIT_PAUSES) == 0:
                try:
                    return self.wait(0)
                except GroupTimeoutError:
                    if deadline.expired:
                        raise
        return self.wait()

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"failed: {self._error}"
        else:
            state = "done" if self.is_completed() else "under way"
        return f"<{type(self).__name__} {state}>"
