"""The table of calls against a model of two ranks, through faults at any moment."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.calls.pending_call import PendingCall
from server.errors import PoolClosedError
from shm_broadcast import CoordinatorError
from tests.server.book import Book, a_call

RANKS = st.integers(0, 1)
RARE = st.integers(0, 2).map(lambda drawn: drawn == 2)


class Sent(NamedTuple):
    call: PendingCall
    number: int
    generation: int


class Calls(RuleBasedStateMachine):
    """Each rank answers its calls in order, with its rank, the call and its own generation."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(3, restartable=True)
        self.table = self.book.table
        self.calls: list[PendingCall] = []
        self.last_sent = 0
        self.made_for: dict[PendingCall, int] = {}
        self.start_workers()

    def start_workers(self) -> None:
        self.inbox: list[deque[Sent]] = [deque(), deque()]
        self.outbox: list[deque[tuple[Sent, int]]] = [deque(), deque()]
        self.blocked: list[Sent | None] = [None, None]
        self.unequal: set[int] = set()
        self.aborted_after: list[PendingCall] | None = None

    def sent(self, call: PendingCall) -> None:
        assert call.number == self.last_sent + 1
        self.last_sent = call.number
        for inbox in self.inbox:
            inbox.append(Sent(call, call.number, self.table.generation))

    def kept(self, call: PendingCall) -> PendingCall:
        self.calls.append(call)
        # During a restart a call is made for the next generation.
        self.made_for[call] = self.table.generation + (not self.table.works)
        return call

    @rule(retry=st.booleans(), may_send=st.booleans(), leaves=st.booleans())
    def call(self, retry: bool, may_send: bool, leaves: bool) -> None:
        call = self.kept(a_call(retry=retry))
        if self.table.accept(call, self.table.generation if may_send else 0):
            if leaves:
                self.sent(call)
            else:
                self.table.unsent(call)
                self.table.expire(call, TimeoutError())

    @rule(retry=st.booleans())
    def submit(self, retry: bool) -> None:
        call = self.kept(a_call(retry=retry))
        call.future()
        self.table.submit(call)

    @rule()
    def send_next(self) -> None:
        call = self.book.next()
        if call is not None:
            self.sent(call)

    def take(self, rank: int) -> Sent | None:
        if self.blocked[rank] is None and self.inbox[rank]:
            return self.inbox[rank].popleft()
        return None

    def answered(self) -> list[PendingCall]:
        return [call for call in self.calls if call.done and call.error is None]

    @rule(rank=RANKS, slips=RARE)
    def reply(self, rank: int, slips: bool) -> None:
        if (sent := self.take(rank)) is not None:
            if slips:
                self.unequal.add(sent.number)
            self.outbox[rank].append((sent, slips * (rank + 1)))

    @rule(rank=RANKS)
    def receive(self, rank: int) -> None:
        if self.outbox[rank]:
            sent, operations = self.outbox[rank].popleft()
            self.book.reply(rank, sent.number, (rank, sent), operations)

    @rule(rank=RANKS, secondary=st.booleans(), aborted=RARE)
    def fail(self, rank: int, secondary: bool, aborted: bool) -> None:
        if (sent := self.take(rank)) is not None:
            self.blocked[rank] = sent
            if aborted and self.aborted_after is None:
                self.aborted_after = self.answered()
            self.book.fail(rank, sent.number, secondary=secondary, aborted=aborted)

    @rule(rank=RANKS, happens=RARE)
    def lose_reply(self, rank: int, happens: bool) -> None:
        """A signal handler raises after the reply was dequeued; the caller breaks the pool."""
        if self.outbox[rank] and happens:
            self.outbox[rank].popleft()
            self.table.break_off(CoordinatorError("amid"), self.table.generation)

    @rule(rank=RANKS, happens=RARE)
    def lose_reply_unseen(self, rank: int, happens: bool) -> None:
        if len(self.outbox[rank]) > 1 and happens:
            self.outbox[rank].popleft()
            sent, _ = self.outbox[rank].popleft()
            self.book.reply(rank, sent.number, "behind the lost one")
            assert not self.table.works

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.calls:
            call = data.draw(st.sampled_from(self.calls))
            self.table.abandon(call)
            self.table.expire(call, TimeoutError())

    @rule(may_report=st.booleans())
    def tick(self, may_report: bool) -> None:
        self.book.may_report = may_report
        self.book.tick()
        for rank, number in list(self.table.resumable):
            blocked = self.blocked[rank]
            assert blocked is not None
            assert blocked.number == number
            assert number not in self.unequal
            self.blocked[rank] = None
        self.table.resumable.clear()

    @rule(happens=RARE)
    def lose_worker(self, happens: bool) -> None:
        if happens:
            self.book.lose_worker()

    @precondition(lambda self: not self.table.works)
    @rule()
    def restart(self) -> None:
        self.start_workers()
        self.book.open(self.table.generation + 1)

    @invariant()
    def no_answer_is_wrong(self) -> None:
        for call in self.calls:
            if call.done and call.error is None:
                for rank, (of, sent) in enumerate(call.values):
                    assert (of, sent.call) == (rank, call)
                    assert call.retry or sent.generation == self.made_for[call]
                    assert sent.number == call.number
        assert self.aborted_after in (None, self.answered())

    @invariant()
    def calls_settle_in_order(self) -> None:
        settled = [call.number for call in self.answered()]
        assert not self.table.in_flight or min(self.table.in_flight) > max(settled, default=0)

    @invariant()
    def the_table_is_sound(self) -> None:
        table = self.table
        assert list(table.in_flight) == sorted(table.in_flight)
        assert len(table.in_flight) <= 3
        assert table.oldest is next(iter(table.in_flight.values()), None)
        assert not table.in_flight or table.works
        held = {*table.in_flight.values(), *table.queued}
        for call in self.calls:
            assert call.done or call in held
            assert call.done != call.ended.locked()

    def teardown(self) -> None:
        self.table.end(PoolClosedError("shut down"))
        assert all(call.done for call in self.calls)
        for call in list(self.table.finished):
            call.hand_out()
        assert all(call.future().done() for call in self.calls)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
