"""Operations under way: what a backend hands back, and the handle that callers hold.

`Pending` is the small thing a backend returns of an operation that is not done yet;
`Work` is what ``async_op=True`` returns to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupTimeoutError

S = TypeVar("S")
T = TypeVar("T")

_AWAIT_PAUSES = (0.0, 0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
"""Seconds between two looks of an `await`; the last one repeats."""


class Pending(Protocol):
    """An operation that a backend has begun. It keeps the tensors it uses alive by itself."""

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""

    def wait(self, deadline: Deadline) -> object:
        """Return once the operation is done.

        Raises:
            GroupTimeoutError: not done by ``deadline``; it is still under way.
            CoordinatorError: it failed.
        """


class AllPending:
    """Several operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def ready(self) -> bool:
        """Whether all of them are."""
        return all(part.ready() for part in self._parts)

    def wait(self, deadline: Deadline) -> None:
        """Wait for all of them, in the order they were begun."""
        for part in self._parts:
            part.wait(deadline)


def all_pending(parts: Sequence[Pending | None]) -> Pending | None:
    """One `Pending` for those of ``parts`` that are not done; None if all are."""
    open_parts = [part for part in parts if part is not None]
    return AllPending(open_parts) if open_parts else None


class PendingThen:
    """An operation, and a step that the first `wait` that succeeds takes behind it."""

    def __init__(self, pending: Pending, step: Callable[[], object]) -> None:
        self._pending = pending
        self._step: Callable[[], object] | None = step

    def ready(self) -> bool:
        """Whether the operation is done."""
        return self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        """Wait for the operation, and take the step if that has not been done."""
        self._pending.wait(deadline)
        if self._step is not None:
            self._step()
            self._step = None


class Work(Generic[T]):
    """A handle on an operation begun with ``async_op=True``.

    It keeps every tensor of the operation alive and may be dropped: the operation then
    still takes place, but a tensor it was to fill must not be looked at. The inputs must
    not be changed, and the result not be read, before `wait` has returned. One thread at a
    time.
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
        """Wrap an operation.

        Args:
            result: what `wait` returns, unless ``finish`` makes it.
            pending: the operation; None if it is done.
            finish: called by the first `wait` that sees the operation done, and again only after
                a GroupTimeoutError of its own; returns the result.
            timeout: seconds that `wait` allows by default.
            keep: whatever else must live as long as the operation.
            failed: told the error, once, if the operation fails.
        """
        self._result = result
        self._pending = pending
        self._finish = finish
        self._timeout = timeout
        self._keep = keep
        self._failed = failed
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once. Collective: no."""
        return self._pending is None or self._error is not None or self._pending.ready()

    ready = is_completed
    """Under this name a work is something that another one can wait for: a `Pending`."""

    def wait(self, timeout: float | Deadline | None = None) -> T:
        """Wait for the operation and return its result; again and again the same.

        Collective: no.

        Args:
            timeout: seconds from now; None: those of the operation itself.

        Raises:
            GroupTimeoutError: not done yet; it is still under way, wait again.
            CoordinatorError: it failed; each further call raises the same error, as it does
                whatever else making the result has raised.
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
        """A work of what ``step`` makes of this one's result, once that is waited for."""
        work: Work[Any] = Work(None, self, lambda: step(self.wait()), self._timeout)
        return work

    def __await__(self) -> Generator[object, None, T]:
        """``await work``: as `wait`, without blocking the event loop."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        deadline = Deadline.after(self._timeout)
        looks = 0
        while not self.is_completed():
            await asyncio.sleep(_AWAIT_PAUSES[min(looks, len(_AWAIT_PAUSES) - 1)])
            looks += 1
            if looks % len(_AWAIT_PAUSES) == 0:
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
