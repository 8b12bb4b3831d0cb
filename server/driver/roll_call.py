"""Waits until all workers of a new generation are ready, or one has failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..control.protocol import Failed, Ready, WorkProgress
from ..control.worker_failure import rebuild
from ..errors import WorkerStartError
from .supervisor import REASON_SECONDS, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm_broadcast import Deadline, QueueHandle

    from ..control.protocol import FromWorker
    from .held_up_by import Sight
    from .supervisor import Supervisor


class RollCall(Watcher):
    """The supervisor's watcher while workers start: collects what they report.

    Attributes:
        replies: the queues that workers on other hosts have made for their replies, by rank.

    Args:
        ranks: all workers of the pool.
        on_progress: called with ``(rank, done, total, what)``; what it raises ends the start.
        show: called with the ranks that are not ready yet, again and again.
        look: looks what workers do that are late.
        patience: seconds to wait for the real cause when a worker reports only that another one
            has failed (hearsay).
        may_say_why: whether a worker may still tell the real cause; it is waited for up to
            `REASON_SECONDS` then.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        on_progress: Callable[[int, int, int, str], None],
        show: Callable[[Iterable[int]], None],
        look: Callable[[Iterable[int]], Sight],
        patience: float,
        may_say_why: Callable[[], bool],
    ) -> None:
        self._on_progress = on_progress
        self._show = show
        self._look = look
        self._patience = patience
        self.replies: dict[int, QueueHandle] = {}
        self._absent = set(ranks)
        self._failure: WorkerStartError | None = None
        self._may_say_why = may_say_why
        self._hearsay: WorkerStartError | None = None
        self._heard_at = 0.0
        self._have_told: set[int] = set()

    def wait(self, supervisor: Supervisor, deadline: Deadline, tick: Callable[[], float]) -> None:
        """Wait until every worker is ready.

        Args:
            supervisor: watches the workers.
            deadline: when to give up.
            tick: called again and again; returns the seconds until its next call.

        Raises:
            WorkerStartError: a worker has failed, or was not ready in time.
            What ``tick`` raises.
        """
        while self._absent:
            self._show(sorted(self._absent))
            supervisor.step(self, min(deadline.remaining(), self._hearsay_remaining(), tick()))
            if self._failure is not None:
                raise self._failure
            if self._hearsay is not None and not self._hearsay_remaining():
                raise self._hearsay
            if deadline.expired and self._absent:
                raise self._late(deadline)

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Note a worker's message; called by the supervisor."""
        match message:
            case Ready(replies):
                self._absent.discard(rank)
                if replies is not None:
                    self.replies[rank] = replies
            case WorkProgress(done, total, what):
                self._on_progress(rank, done, total, what)
            case Failed():
                self._failed(rank, message)

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Note that a worker's process has ended, unless it has reported hearsay before."""
        if rank not in self._have_told:
            self._failure = self._failure or WorkerStartError(rank, how, stack)

    def _failed(self, rank: int, failed: Failed) -> None:
        self._have_told.add(rank)
        cause = rebuild(failed, rank, "__init__")
        error = WorkerStartError(rank, f"{failed.kind}: {failed.message}", failed.traceback)
        error.__cause__ = cause.__cause__
        if not failed.consequence:
            self._failure = self._failure or error
        elif self._hearsay is None:
            self._hearsay = error
            self._heard_at = time.monotonic()

    def _hearsay_remaining(self) -> float:
        if self._hearsay is None:
            return float("inf")
        since = time.monotonic() - self._heard_at
        if since >= self._patience and self._may_say_why():
            return max(REASON_SECONDS - since, 0.0)
        return max(self._patience - since, 0.0)

    def _late(self, deadline: Deadline) -> WorkerStartError:
        seen = self._look(self._absent)
        rank = min({*seen.held_up_by} & self._absent or self._absent)
        late = ", ".join(map(str, sorted(self._absent)))
        more = f"; {seen.why}" if seen.why else ""
        reason = f"not ready after {deadline.timeout:g} s (late: {late}{more})"
        return WorkerStartError(rank, reason, seen.stacks.get(rank, ""))
