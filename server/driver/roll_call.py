"""Waits until all workers of a new generation are ready, or one has failed."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from ..control.attentive_clock import AttentiveClock
from ..control.protocol import Failed, Ready, WorkProgress
from ..control.worker_failure import rebuild
from ..errors import WorkerStartError
from .supervisor import REASON_SECONDS, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from shm_broadcast import Deadline, QueueHandle

    from ..control.protocol import FromWorker
    from .held_up_by import Sight
    from .pool_plan import PoolPlan
    from .supervisor import Supervisor

_LOOK_SECONDS: Final = 1.0
"""How often to look at most whether a worker cannot finish its start: a look takes 10 ms."""
_log = logging.getLogger(__name__)


class RollCall(Watcher):
    """The supervisor's watcher while workers start: collects what they report.

    Attributes:
        replies: the queues that workers on other hosts have made for their replies, by rank.

    Args:
        ranks: all workers of the pool.
        plan: the pool's; what its ``on_progress`` raises ends the start.
        show: called with the ranks that are not ready yet, again and again.
        look: looks what workers do that are late.
        stuck: says why some of the ranks that it is given cannot finish their start.
        may_say_why: whether a worker may still tell the real cause; it is waited for up to
            `REASON_SECONDS` then.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        plan: PoolPlan,
        show: Callable[[Iterable[int]], None],
        look: Callable[[Iterable[int]], Sight],
        stuck: Callable[[AbstractSet[int]], Mapping[int, str]],
        may_say_why: Callable[[], bool],
    ) -> None:
        self._on_progress = plan.on_progress
        self._show = show
        self._look = look
        self._stuck = stuck
        self._stuck_after = math.inf if plan.stuck_after is None else plan.stuck_after
        self._clock = AttentiveClock(self._stuck_after / 4)
        self._look_seconds = min(_LOOK_SECONDS, self._stuck_after / 4)
        self._look_at = time.monotonic() + self._look_seconds
        self._stuck_since: dict[tuple[int, str], float] = {}
        self._patience = plan.config.stack_seconds  # for the real cause, behind hearsay
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
            pause = min(deadline.remaining(), self._hearsay_remaining(), tick())
            supervisor.step(self, min(pause, max(self._look_at - time.monotonic(), 0.0)))
            if self._failure is not None:
                raise self._failure
            if self._hearsay is not None and not self._hearsay_remaining():
                raise self._hearsay
            if self._look_at <= time.monotonic():
                self._look_for_stuck()
            if deadline.expired and self._absent:
                raise self._late(deadline)

    def _look_for_stuck(self) -> None:
        """Name workers that cannot finish their start, once each.

        Raises:
            WorkerStartError: one could not for as long as a call may take.
        """
        stuck, now = self._stuck(self._absent), self._clock.look()
        for rank, why in sorted(stuck.items() - self._stuck_since.keys()):
            _log.warning("the worker of rank %d does not start: %s", rank, why)
        self._stuck_since = {each: self._stuck_since.get(each, now) for each in stuck.items()}
        for (rank, why), since in self._stuck_since.items():
            if now - since >= self._stuck_after:
                stacks = self._look([rank]).stacks
                reason = f"stuck for {self._stuck_after:g} s: {why}"
                raise WorkerStartError(rank, reason, stacks.get(rank, ""))
        self._look_at = time.monotonic() + self._look_seconds

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
