"""A ledger of two ranks, for tests of what it does with calls and replies."""

from __future__ import annotations

import math
from typing import Any

from server.calls.ledger import CallTracker, CallTrackerCallbacks
from server.calls.pending_call import PendingCall
from server.control.pool_memory import CancellationFlags
from server.control.protocol import Failed, Reply
from server.errors import WorkerLostError
from tests.server.begun import begun


class Book:
    """A ledger of two ranks, and what it asked for."""

    def __init__(
        self,
        in_flight: int = 2,
        settle_seconds: float = 60.0,
        call_seconds: float = math.inf,
        stuck_seconds: float = math.inf,
        *,
        name: str = "",
        restartable: bool = False,
        ticks: bool = True,
    ) -> None:
        self.clocked = False
        self._ticks = ticks
        self.asked: list[Any] = []
        self.cancelled = CancellationFlags.create(in_flight)
        self.ledger = CallTracker(
            in_flight,
            call_seconds,
            settle_seconds,
            CallTrackerCallbacks(
                resume=lambda rank, number: self.asked.append(("resume", rank, number)),
                wake=lambda: None,
                clock=self._clock,
                broke=lambda error: self.asked.append(("broke", type(error))),
                late=lambda calls: self.asked.append(("late", [call.method for call in calls])),
                stuck=lambda call: self.asked.append(("stuck", call.method)),
            ),
            name=name,
            restartable=restartable,
            stuck_seconds=stuck_seconds,
        )
        self.ledger.open(1, self.cancelled.mark)

    def _clock(self) -> None:
        self.clocked = True
        if self._ticks:
            self.look()

    def look(self) -> None:
        """Tick if the ledger has asked for it, as another thread does in a pool."""
        if self.clocked:
            self.clocked = False
            self.ledger.tick()

    def send(
        self, method: str = "embed", reply_rank: int | None = None, *, retry: bool = False
    ) -> PendingCall:
        call = PendingCall(method, (), {}, 2, reply_rank, retry=retry)
        self.ledger.accept(call, self.ledger.state.generation)
        return call

    def reply(self, rank: int, number: int, value: Any = None, operations: int = 0) -> None:
        self.ledger.replied(rank, Reply(number, begun((0, 1), all_reduce=operations), value))

    def answer(self, number: int, *values: Any) -> None:
        """Both ranks reply: with ``values``, by rank, or None."""
        for rank, value in enumerate(values or (None, None)):
            self.reply(rank, number, value)

    def fail(
        self,
        rank: int,
        number: int,
        kind: str = "E",
        operations: int = 0,
        hearsay: bool = False,
        final: bool = False,
        diverged: bool = False,
    ) -> None:
        did = begun((0, 1), all_reduce=operations)
        failed = Failed(number, did, kind, "text", "trace", hearsay, diverged)
        self.ledger.failed(rank, failed, final)

    def lose_worker(self) -> None:
        self.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))


def a_call(*, retry: bool = False) -> PendingCall:
    return PendingCall("embed", (), {}, 2, None, retry=retry)
