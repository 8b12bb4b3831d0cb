"""A table of calls, its calls and what two ranks have begun in them: decided without processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from device_comm.call_number import OperationCounts
from device_comm.shm.signature import sign
from server.calls.call_table import CallTable, DueCalls
from server.calls.pending_call import PendingCall
from server.control.protocol import Failed, Reply
from server.errors import WorkerLostError
from shm_broadcast import CoordinatorError
from tests.calls import in_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.call_counts import GroupOperationCounts


class AbortError(CoordinatorError):
    """Stands for the abort of the board."""


def a_call(*, retry: bool = False, timeout: float | None = None) -> PendingCall:
    return PendingCall("embed", (), {}, 2, None, timeout, retry=retry)


def begun(
    ranks: tuple[int, ...],
    name: str = "tp",
    number: int = 0,
    sent: Mapping[int, int] | None = None,
    received: Mapping[int, int] | None = None,
    signatures: tuple[bytes, ...] = (),
    **verbs: int,
) -> tuple[GroupOperationCounts, ...]:
    """What a member of one group reports: the collectives ``signatures``, then so many of each
    verb, and messages by rank in it.
    """
    did = OperationCounts(len(ranks))
    with in_call(1):
        signed = [sign(verb) for verb, count in verbs.items() for _ in range(count)]
        for signature in (*signatures, *signed):
            did.add(signature)
        for counted, count_one in ((sent, did.count_sent), (received, did.count_received)):
            for peer, count in (counted or {}).items():
                for _ in range(count):
                    count_one(peer)
    taken = did.take()
    return ((name, ranks, bytes([number]), *taken),) if any(taken) else ()


class Book:
    """A table with one open generation; ``marked`` has the numbers of cancelled calls."""

    def __init__(
        self,
        in_flight: int = 2,
        settle_seconds: float = 60.0,
        call_seconds: float = math.inf,
        stuck_seconds: float = math.inf,
        *,
        restartable: bool = False,
    ) -> None:
        self.may_report = False
        self.marked: list[int] = []
        self.table = CallTable(
            in_flight,
            call_seconds,
            settle_seconds,
            restartable=restartable,
            stuck_seconds=stuck_seconds,
        )
        self.open(1)

    def open(self, generation: int) -> None:
        self.table.open(generation, self.marked.append)

    def tick(self) -> DueCalls:
        return self.table.tick(lambda: self.may_report)

    def send(self, method: str = "embed", *, retry: bool = False) -> PendingCall:
        call = PendingCall(method, (), {}, 2, None, retry=retry)
        self.table.accept(call, self.table.generation)
        return call

    def next(self) -> PendingCall | None:
        return self.table.next_to_send(self.table.generation)

    def reply(self, rank: int, number: int, value: Any = None, operations: int = 0) -> None:
        self.table.replied(rank, Reply(number, begun((0, 1), all_reduce=operations), value))

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
        *,
        secondary: bool = False,
        aborted: bool = False,
        diverged: bool = False,
    ) -> None:
        did = begun((0, 1), all_reduce=operations)
        failed = Failed(number, did, kind, "text", "trace", secondary, diverged)
        self.table.failed(rank, failed, AbortError("aborted") if aborted else None)

    def lose_worker(self) -> None:
        self.table.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))

    def resumed(self) -> list[tuple[int, int]]:
        return list(self.table.resumable)
