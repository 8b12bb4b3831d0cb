"""The table of calls: their order, answers, deadlines and restarts, without processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

import server.calls
from server.calls.pending_call import PendingCall
from server.errors import CallDivergedError, WorkerError, WorkerLostError
from shm_broadcast import CoordinatorError, MessageDecodeError
from tests.interruptions import interruptions
from tests.server.book import AbortError, Book, a_call

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.quick


def test_the_first_failure_is_kept() -> None:
    book = Book()
    calls = [book.send(), book.send()]
    unsent = calls[1]
    book.lose_worker()
    book.table.unsent(unsent)
    book.table.end(WorkerLostError(0, 4241, "exit status 1"))
    for call in calls:
        with pytest.raises(WorkerLostError, match=r"rank 1 \(pid 4242\): killed by SIGKILL"):
            call.result()
    with pytest.raises(WorkerLostError, match="rank 1") as raised:
        book.table.check()
    assert "takes no more calls" in raised.value.__notes__[-1]


def test_at_most_in_flight_calls_are_sent_and_the_rest_in_order() -> None:
    book = Book(in_flight=2)
    calls = [book.send() for _ in range(4)]
    assert [call.number for call in calls] == [1, 2, 0, 0]
    assert book.next() is None
    queued = a_call()
    assert not book.table.accept(queued, 0)  # another thread sends
    for number in (1, 2):
        book.answer(number)
        assert book.next() is calls[number + 1]
    assert [call.number for call in calls] == [1, 2, 3, 4]
    book.answer(3)
    assert book.next() is queued


def test_calls_without_a_caller_are_not_sent_or_are_marked_in_flight() -> None:
    book = Book(in_flight=1)
    first, withdrawn = book.send(), book.send()
    cancelled, last = a_call(), a_call()
    assert cancelled.future().cancel()
    book.table.submit(cancelled)
    book.table.submit(last)
    book.table.abandon(withdrawn)
    book.table.abandon(first)
    assert book.marked == [1]
    book.answer(1)
    book.table.cancel(first)
    assert book.next() is last
    assert (last.number, book.marked) == (2, [1])


def test_an_unreadable_reply_fails_the_oldest_call_of_its_rank_and_may_be_received_again() -> None:
    """As without a free descriptor: the message is kept."""
    book = Book()
    first, second = book.send(), book.send()
    book.reply(1, 1)
    for _ in range(2):
        book.table.garbled(0, MessageDecodeError("garbled"), 1)
    with pytest.raises(MessageDecodeError, match=r"reply of rank 0 to .* cannot be read: garbled"):
        first.result()
    assert (second.done, book.table.failure) == (False, None)
    for number in (1, 2):
        book.reply(0, number)
    book.reply(1, 2)
    with pytest.raises(MessageDecodeError):
        second.result()
    assert book.table.failure is None


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_call_is_late_when_none_was_answered_for_long(clock: Clock) -> None:
    book = Book(call_seconds=300.0)
    first, second = a_call(), a_call()
    book.table.submit(first)
    assert book.table.attention
    assert book.tick() == ([], None, 300.0)
    book.table.submit(second)
    assert not book.table.attention
    assert (book.next(), book.next()) == (first, second)
    clock.now += 200.0
    book.answer(1)
    clock.now += 200.0
    assert book.tick() == ([], None, 100.0)
    clock.now += 100.0
    assert book.tick() == ([second], None, math.inf)
    assert book.tick() == ([], None, math.inf)


def test_a_call_with_its_own_timeout_is_late_though_others_are_answered(clock: Clock) -> None:
    book = Book(call_seconds=300.0)
    own = a_call(timeout=2.0)
    book.send()
    book.table.submit(own)
    book.answer(1)
    assert book.tick() == ([], None, 2.0)
    clock.now += 2.0
    assert book.tick() == ([own], None, math.inf)
    assert book.table.due(own).timeout == 2.0


def test_a_stuck_call_is_reported_once(clock: Clock) -> None:
    book = Book(stuck_seconds=8.0)
    first, second = book.send(), book.send()
    for call in (first, second):
        for _ in range(4):
            assert book.tick() == ([], None, 2.0)
            clock.now += 2.0
        assert book.tick().stuck is call
        assert book.tick().stuck is None
        book.answer(call.number)


@pytest.mark.parametrize("limit", ["stuck_seconds", "settle_seconds"])
def test_a_pool_that_was_paused_as_a_whole_goes_on(limit: str, clock: Clock) -> None:
    book = Book(**{limit: 8.0})
    call = book.send()
    book.fail(0, 1)
    book.tick()
    clock.now += 3600.0
    for _ in range(3):
        assert book.tick() == ([], None, 2.0)
        assert book.table.failure is None
        clock.now += 2.0
    tick = book.tick()
    assert (tick.stuck is call, book.table.failure is not None) == (
        limit == "stuck_seconds",
        limit == "settle_seconds",
    )


def test_a_failure_reaches_the_caller_at_once_and_its_rank_waits_for_the_others() -> None:
    book = Book()
    call = book.send()
    book.fail(1, 1, "ValueError", operations=3)
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError: text"):
        call.result()
    assert book.resumed() == []
    book.reply(0, 1, operations=3)
    assert book.resumed() == [(1, 1)]
    assert book.table.failure is None


def test_the_pool_breaks_when_operations_were_left_half_done() -> None:
    book = Book()
    book.send()
    later = book.send()
    book.fail(1, 1, "ValueError")
    book.reply(0, 1, operations=1)
    for refused in (later.result, book.table.check, book.send):
        with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError"):
            refused()


def test_a_call_in_which_ranks_differ_fails_and_no_later_one_is_answered() -> None:
    """Rank 0 is a call ahead: rank 1 took from the next call what rank 0 left out."""
    book = Book(in_flight=3)
    first, second, third = (book.send() for _ in range(3))
    for number in (1, 2):
        book.reply(0, number, "a", operations=2)
    book.reply(1, 1, "b", operations=2)
    assert first.result() == ["a", "b"]
    book.reply(0, 3, "a", operations=1)
    book.reply(1, 2, "b", operations=1)
    expected = r"call 2 \(embed\): in group tp, rank 0 began all_reduce .* where rank 1 began 1"
    for refused in (second.result, third.result, book.table.check, book.send):
        with pytest.raises(CallDivergedError, match=expected):
            refused()
    book.reply(1, 3, "b", operations=1)
    with pytest.raises(CallDivergedError):
        third.result()


def test_a_divergence_names_the_calls_in_flight() -> None:
    book = Book()
    first, _ = book.send("forward"), book.send("backward")
    book.fail(1, 1, "DivergenceError", diverged=True, aborted=True)
    expected = r"text \(under way: call 1 \(forward\), call 2 \(backward\)\)"
    with pytest.raises(WorkerError, match=expected):
        first.result()


def test_the_time_of_a_failed_call_begins_after_all_earlier_calls() -> None:
    book = Book(settle_seconds=0.0)
    book.send()
    second = book.send()
    book.fail(0, 2)
    assert book.tick().seconds == math.inf
    book.answer(1)
    assert book.table.attention
    book.tick()
    assert isinstance(book.table.failure, WorkerError)
    assert second.done
    book = Book()
    book.send()
    assert book.tick().seconds == math.inf
    book.fail(1, 1)
    assert 0 < book.tick().seconds <= 60
    book.fail(0, 1)
    assert book.tick().seconds == math.inf


def test_a_failure_of_a_rank_s_own_replaces_a_consequence_of_another() -> None:
    book = Book()
    call, other = book.send(), book.send()
    book.fail(0, 1, "PeerLostError", secondary=True)
    assert not call.done
    book.fail(1, 1, "ValueError")
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError"):
        call.result()
    assert book.table.failure is None
    book.fail(0, 2, "PeerLostError", operations=1, secondary=True)
    book.reply(1, 2)
    for refused in (other.result, book.table.check):
        with pytest.raises(WorkerError, match=r"rank 0 .*embed: PeerLostError"):
            refused()


@pytest.mark.parametrize("evidence", ["none", "the end of a process", "an own exception"])
@pytest.mark.parametrize("secondary", [True, False])
def test_an_abort_has_the_best_evidence(clock: Clock, evidence: str, secondary: bool) -> None:
    book = Book(settle_seconds=1.0)
    book.may_report = True
    early, late = book.send(), book.send()
    expected = "aborted" if secondary else "a queue ended"
    if secondary:
        book.fail(0, 1, "GroupAbortedError", secondary=True, aborted=True)
    else:
        book.table.saw_abort(CoordinatorError("a queue ended"))
    book.reply(1, 1)
    if evidence == "the end of a process":
        lost = WorkerLostError(1, 4242, "killed by SIGABRT")
        book.table.saw_abort(CoordinatorError("a queue ended"), lost)
        expected = "rank 1 .*killed by SIGABRT"
    elif evidence == "an own exception":
        book.fail(1, 2, "ValueError", aborted=True)
        expected = "rank 1 .*embed: ValueError"
        book.tick()
        assert book.table.failure is not None
    for _ in range(6) if evidence != "an own exception" else ():
        book.tick()
        assert (early.done, book.table.failure) == (False, None)
        clock.now += 0.8
    clock.now += 0.8
    book.tick()
    for refused in (early.result, late.result, book.table.check):
        with pytest.raises(CoordinatorError, match=expected):
            refused()


@pytest.mark.parametrize("answered", [True, False])
def test_an_abort_breaks_the_pool_once_no_worker_may_report(clock: Clock, answered: bool) -> None:
    """At once if all ranks have reported, else after the time to settle."""
    book = Book(settle_seconds=1.0)
    book.may_report = True
    book.send()
    for rank in (0, 1) if answered else (0,):
        book.fail(rank, 1, "GroupAbortedError", secondary=True, aborted=True)
    book.tick()
    book.may_report = False
    book.tick()
    assert (book.table.failure is None) == (not answered)
    for _ in range(4):
        clock.now += 0.25
        book.tick()
    with pytest.raises(AbortError):
        book.table.check()


def test_a_restart_fails_all_calls_without_retry() -> None:
    book = Book(in_flight=3, restartable=True)
    had, again, third = (a_call(retry=retry) for retry in (False, True, True))
    for call in (had, again, third):
        assert book.table.accept(call, 1)
    not_sent, queued = book.send(), book.send(retry=True)
    book.lose_worker()
    for lost in (had, not_sent):
        with pytest.raises(WorkerLostError, match="rank 1"):
            lost.result()
    assert not (again.done or third.done or queued.done)
    assert isinstance(book.table.restarting, WorkerLostError)
    assert (book.table.restarts, book.table.ended) == (0, None)
    later = book.send()
    assert book.table.next_to_send(1) is None
    book.open(2)
    assert (book.table.restarting, book.table.restarts) == (None, 1)
    for number, call in enumerate((again, third, queued), 4):
        assert book.next() is call
        assert call.number == number
    for number in (4, 5, 6):
        book.answer(number, "a", "b")
    assert again.result() == third.result() == queued.result() == ["a", "b"]
    assert book.next() is later


def test_an_earlier_generation_changes_nothing() -> None:
    book = Book(in_flight=1, restartable=True)
    again = a_call(retry=True)
    assert book.table.accept(again, 1)
    book.reply(0, 1, "old")
    book.lose_worker()
    book.open(2)
    assert book.next() is again
    waiting = book.send()
    book.reply(1, 1, "old")
    book.table.garbled(0, MessageDecodeError("garbled"), 1)
    book.table.break_off(WorkerLostError(0, 4241, "killed by SIGKILL"), generation=1)
    assert not book.table.accept(a_call(), 1)
    assert not waiting.done
    book.answer(2, "a", "b")
    assert again.result() == ["a", "b"]


def test_a_call_is_sent_three_times_at_most() -> None:
    book = Book(in_flight=1, restartable=True)
    sent, queued = a_call(retry=True), a_call(retry=True)
    for call in (sent, queued):
        book.table.submit(call)
    for generation in (1, 2, 3):
        assert not sent.done
        assert book.next() is sent
        book.lose_worker()
        book.open(generation + 1)
    with pytest.raises(WorkerLostError):
        sent.result()
    assert book.next() is queued
    book.answer(4, "a", "b")
    assert queued.result() == ["a", "b"]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_error_of_a_call_with_retry_waits_for_the_calls_before_it(breaks: bool) -> None:
    """One of them may be the cause: then the call runs again."""
    book = Book(in_flight=3, restartable=True)
    first, without, again = book.send(), book.send(), book.send(retry=True)
    for call in (without, again):
        book.fail(1, call.number)
    book.tick()
    assert (without.done, again.done) == (True, False)
    for rank in (0, 1):
        book.reply(rank, first.number, operations=rank if breaks else 0)
    book.tick()
    assert not again.done
    if breaks:
        assert isinstance(book.table.failure, CallDivergedError)
        book.open(2)
        assert book.next() is again
        book.answer(again.number, "a", "b")
        assert again.result() == ["a", "b"]
    else:
        book.reply(0, without.number)
        book.tick()
        with pytest.raises(WorkerError, match="rank 1 failed"):
            again.result()


def test_a_future_outlives_its_generation_and_can_then_not_be_cancelled() -> None:
    book = Book(restartable=True)
    call = a_call(retry=True)
    future = call.future()
    book.table.submit(call)
    assert book.next() is call
    book.lose_worker()
    assert not future.cancel()
    book.open(2)
    assert book.next() is call
    book.answer(2, "a", "b")
    assert list(book.table.finished) == [call]
    call.hand_out()
    assert future.result(timeout=0) == ["a", "b"]


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        lambda book: book.reply(1, 1, "one"),
        lambda book: book.fail(1, 1),
        lambda book: book.reply(1, 1, operations=1),
        lambda book: book.lose_worker(),
        lambda book: book.table.accept(a_call(), 1),
    ],
    ids=["reply", "failure", "divergence", "loss", "call"],
)
def test_an_interrupt_anywhere_loses_no_call(
    act: Callable[[Book], object], restartable: bool
) -> None:
    book, calls, places = Book(), list[PendingCall](), 0

    def prepare() -> None:
        nonlocal book, calls
        book = Book(in_flight=3, restartable=restartable)
        calls = [book.send(), book.send(), book.send(retry=True), a_call(), a_call(retry=True)]
        for call in calls[3:]:
            call.future()
            book.table.submit(call)
        book.reply(0, 1, "zero")

    prepare()
    for place in interruptions(lambda: act(book), server.calls):
        places += 1
        book.table.break_off(CoordinatorError("amid"))
        book.tick()
        waiting = [call for call in calls if restartable and call.retry]
        assert [call for call in calls if not call.done] == waiting, place
        assert [*book.table.queued] == waiting, place
        assert not any(call.done == call.ended.locked() for call in calls), place
        for call in [*book.table.finished]:
            call.hand_out()
        assert calls[3].future().done()
        assert calls[0].error is not None or calls[0].result() == ["zero", "one"], place
        prepare()
    assert places > 3
