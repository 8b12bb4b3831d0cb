"""Decides which items of the waiting requests go into the next batch.

Pure logic: no waiting, no tasks. The requests take turns, in the order of arrival. In its turn a
request may fill a share of a batch's tokens; the rest of its items wait for its next turn, behind
the other requests (deficit round robin). So a small request waits for one share of each request
that came before it, however large these are, and a large one that is alone fills whole batches.

A signal handler may raise after any call, but never between two assignments, so the count of
waiting items stays correct.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import QueueFullError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence, Sized

    from ..spans import Carrier

Item = TypeVar("Item", bound="Sized")
Result = TypeVar("Result")

_SHARES = 4
"""In one turn a request may fill a batch to one part in this many."""


@dataclass(eq=False)
class BatchRequest(Generic[Item, Result]):
    """Items that are answered together.

    Attributes:
        items: what was asked; the length of each is what it costs.
        results: one for each item, filled in once its batch is done.
        left: how many results are missing.
        answer: given ``results`` when none is missing.
        next: the index of the first item that is in no batch yet.
        credit: the tokens that it may still put into batches in this turn.
        trace: the trace context of whoever asks.
    """

    items: Sequence[Item]
    results: list[Any]
    left: int
    answer: asyncio.Future[list[Result]]
    next: int = 0
    credit: int = 0
    trace: Carrier | None = None

    @property
    def waiting(self) -> int:
        """How many items are in no batch yet."""
        return len(self.items) - self.next


@dataclass(frozen=True, slots=True)
class RequestPiece(Generic[Item, Result]):
    """The part ``items[start:stop]`` of a request, in one batch."""

    request: BatchRequest[Item, Result]
    start: int
    stop: int

    @property
    def items(self) -> Sequence[Item]:
        """The items of this part."""
        return self.request.items[self.start : self.stop]


@dataclass
class BatchQueue(Generic[Item, Result]):
    """The requests of which items wait for a batch.

    Attributes:
        max_tokens: tokens of a batch at most; an item that has more is a batch of its own.
        max_waiting: items that may wait, at most.
        waiting: how many items wait.
    """

    max_tokens: int
    max_waiting: int
    waiting: int = 0
    _turns: deque[BatchRequest[Item, Result]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a limit below 1."""
        if self.max_tokens < 1 or self.max_waiting < 1:
            raise ValueError(
                "max_tokens and max_waiting must be 1 or more; "
                f"got {self.max_tokens} and {self.max_waiting}"
            )
        self._share = max(1, self.max_tokens // _SHARES)

    def add(self, request: BatchRequest[Item, Result]) -> None:
        """Let a request wait, behind the others.

        Raises:
            QueueFullError: there is no room for all of it.
        """
        asked = len(request.items)
        if self.waiting + asked > self.max_waiting:
            raise QueueFullError(asked, self.waiting, self.max_waiting)
        request.credit = self._share
        self.waiting += asked
        self._turns.append(request)

    def take(self) -> list[RequestPiece[Item, Result]]:
        """The next batch; empty if nothing waits."""
        batch: list[RequestPiece[Item, Result]] = []
        room = self.max_tokens
        while self._turns:
            request = self._turns[0]
            piece, cost, full = self._turn(request, room, first=not batch)
            if piece.stop > piece.start:
                batch.append(piece)
                room -= cost
            if full:
                break
            if request.waiting:
                request.credit += self._share
                self._turns.rotate(-1)
            else:
                self._turns.popleft()
        return batch

    def _turn(
        self, request: BatchRequest[Item, Result], room: int, first: bool
    ) -> tuple[RequestPiece[Item, Result], int, bool]:
        """What a request puts into a batch, how many tokens that is, and whether the batch is full.

        ``first``: the batch is empty so far, so that one item fits, however many tokens it has.
        """
        start, taken = request.next, 0
        full = False
        while request.waiting:
            cost = len(request.items[request.next])
            if cost > request.credit:
                break
            full = taken + cost > room and not (first and not taken)
            if full:
                break
            taken += cost
            request.credit -= cost
            request.next += 1
            self.waiting -= 1
        return RequestPiece(request, start, request.next), taken, full

    def drop(self, request: BatchRequest[Item, Result]) -> None:
        """Forget the items of a request that are in no batch yet."""
        if request in self._turns:
            left = request.waiting
            self.waiting -= left
            self._turns.remove(request)
