"""What answers to calls mean, in which order calls are sent, and who waits; without processes."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest

from server.calls.pending_call import PendingCall
from server.errors import CallDivergedError, PoolClosedError, WorkerError, WorkerLostError
from shm_broadcast import CoordinatorError, MessageDecodeError
from tests.server.book import Book, a_call


def test_a_call_is_done_when_every_rank_has_answered() -> None:
    book = Book()
    everyone, one = book.send(), book.send(reply_rank=1)
    book.reply(1, 1, "b")
    assert not everyone.done
    book.reply(0, 1, "a")
    assert everyone.result() == ["a", "b"]
    book.reply(1, 2, "c")
    assert not one.done
    book.reply(0, 2)
    assert one.result() == "c"
    assert not book.ledger.queued.busy


def test_nothing_holds_a_call_that_is_over_also_if_the_clock_looked_at_it_meanwhile() -> None:
    def answered(book: Book, call: PendingCall) -> None:
        book.answer(call.number)

    def unsent(book: Book, call: PendingCall) -> None:
        book.ledger.unsent(call)

    def broken(book: Book, call: PendingCall) -> None:
        book.ledger.break_off(WorkerLostError(0, 1, "killed"))

    for end in (answered, unsent, broken):
        book = Book()
        call = book.send()
        book.ledger.tick()
        end(book, call)
        assert [each for each in gc.get_referrers(call) if each is not globals()] == [], end


def test_whatever_goes_wrong_says_in_which_pool() -> None:
    def failed(book: Book) -> None:
        book.fail(0, 1)

    def garbled(book: Book) -> None:
        book.ledger.garbled(0, MessageDecodeError("what is this"), 1)
        book.reply(1, 1)

    def diverged(book: Book) -> None:
        book.reply(0, 1, operations=1)
        book.reply(1, 1, operations=2)

    def lost(book: Book) -> None:
        book.ledger.break_off(WorkerLostError(0, 1, "killed"))

    for wrong in (failed, garbled, diverged, lost):
        told = []
        for name in ("replica 1", ""):
            book = Book(name=name)
            call = book.send()
            wrong(book)
            with pytest.raises(CoordinatorError) as caught:
                call.result()
            told.append(str(caught.value))
        assert told[0] == f"replica 1: {told[1]}", wrong


def test_a_call_that_timed_out_on_its_way_gets_what_broke_the_pool() -> None:
    book = Book()
    call = a_call()
    assert book.ledger.accept(call, 1)
    book.ledger.end(WorkerLostError(1, 4242, "killed by SIGKILL"))
    book.ledger.unsent(call)
    with pytest.raises(WorkerLostError):
        call.result()


def test_the_first_failure_is_the_one_that_is_kept() -> None:
    book = Book()
    calls = [book.send(), book.send()]
    book.ledger.end(WorkerLostError(1, 4242, "killed by SIGKILL"))
    book.ledger.end(WorkerLostError(0, 4241, "exit status 1"))
    for call in calls:
        with pytest.raises(WorkerLostError, match=r"rank 1 \(pid 4242\): killed by SIGKILL"):
            call.result()
    with pytest.raises(WorkerLostError, match="rank 1") as raised:
        book.ledger.state.check()
    assert "takes no more calls" in raised.value.__notes__[-1]
    assert book.asked == [("broke", WorkerLostError)]


def test_a_closed_pool_fails_its_calls_and_did_not_break() -> None:
    book = Book()
    call = book.send()
    book.ledger.end(PoolClosedError("shut down"))
    with pytest.raises(PoolClosedError):
        call.result()
    assert book.asked == []


def test_no_more_calls_are_under_way_than_allowed_and_the_rest_go_in_order() -> None:
    book = Book(in_flight=2)
    calls = [book.send() for _ in range(4)]
    assert [call.number for call in calls] == [1, 2, 0, 0]
    book.answer(1)
    assert book.ledger.next_to_send(1) is calls[2]
    assert calls[2].number == 3
    book.answer(2)
    assert book.ledger.next_to_send(1) is calls[3]


def test_a_call_waits_for_the_one_that_is_being_sent() -> None:
    book = Book(in_flight=2)
    first, second = (a_call() for _ in range(2))
    assert book.ledger.accept(first, 1)
    assert not book.ledger.accept(second, 1, may_send=False)
    assert book.ledger.next_to_send(1) is second


def test_the_future_of_a_call_that_could_not_be_sent_gets_why() -> None:
    book = Book()
    call = a_call()
    future = call.future()
    book.ledger.queue(call)
    assert book.ledger.next_to_send(1) is call
    book.ledger.abandon(call, TypeError("cannot pickle"))
    with pytest.raises(TypeError, match="cannot pickle"):
        future.result(timeout=0)


def test_a_queued_call_can_be_withdrawn_and_a_cancelled_one_is_skipped() -> None:
    book = Book(in_flight=1, call_seconds=60.0)
    first, withdrawn = book.send(), book.send()
    cancelled, last = (a_call() for _ in range(2))
    assert cancelled.future().cancel()
    book.ledger.queue(cancelled)
    book.ledger.queue(last)
    for call in (withdrawn, first):
        book.ledger.give_up(call)
    assert book.ledger.late(withdrawn) == []
    assert book.ledger.late(first) == [0, 1]
    book.answer(1)
    assert book.ledger.next_to_send(1) is last
    assert list(book.ledger._lateness._watched) == [last]  # what was cancelled is not kept


def test_a_call_that_nobody_waits_for_is_marked_while_it_is_under_way() -> None:
    book = Book(in_flight=2)
    first, second = book.send(), book.send()
    book.ledger.cancel(second)
    assert (1 in book.cancelled, 2 in book.cancelled) == (False, True)
    for number in (1, 2):
        book.answer(number)
    book.ledger.cancel(first)
    book.send()
    assert 3 not in book.cancelled


def test_a_stream_ends_on_all_ranks_or_fails() -> None:
    book = Book(in_flight=4)
    calls = [PendingCall("words", (), {}, 2, 1, stream=number) for number in (1, 1, 1, -1)]
    for call in calls:
        assert book.ledger.accept(call, 1)
    values: list[Any] = [((None,), ("a",)), ((None,), ("b",)), ((), ("c",)), (None, None)]
    for number, pair in enumerate(values, 1):
        book.answer(number, *pair)
    assert [call.result() for call in calls[:2]] == [("a",), ("b",)]
    with pytest.raises(CallDivergedError) as raised:
        calls[2].result()
    assert str(raised.value) == (
        "call 3 (words): in group world, rank 0 ended the stream where rank 1 went on with it"
    )
    assert calls[3].result() is None
    assert book.ledger.state.ended is None


def test_futures_get_the_result_before_and_after_it_is_known() -> None:
    book = Book()
    call = book.send(reply_rank=0)
    early = call.future()
    seen: list[Any] = []
    early.add_done_callback(lambda future: seen.append(future.result()))
    book.reply(0, 1, "a")
    book.reply(1, 1)
    assert seen == ["a"]
    assert call.future() is early
    late = book.send()
    book.fail(0, 2)
    assert isinstance(late.future().exception(timeout=0), WorkerError)


def test_a_call_can_be_awaited_before_and_after_it_is_done() -> None:
    book = Book()
    early, late = book.send(), book.send()
    assert not book.ledger.wait_until_done(early, 0.01)
    for number in (1, 2):
        book.answer(number)
    assert book.ledger.wait_until_done(early, 0.0)
    assert book.ledger.wait_until_done(late, math.inf)


def test_the_sender_is_released_at_the_end() -> None:
    book = Book()
    released: list[Any] = []
    sender = threading.Thread(target=lambda: released.append(book.ledger.wait_to_send(1)))
    sender.start()
    book.ledger.end(PoolClosedError("shut down"))
    sender.join(10)
    assert released == [False]
    assert book.ledger.state.over(1)
    assert book.ledger.wait_until_idle(0)


def test_results_are_handed_out_without_a_look_at_them() -> None:
    class Tensor:
        def __bool__(self) -> bool:
            raise RuntimeError("ambiguous")

    book, value = Book(), Tensor()
    call = book.send()
    book.answer(1, value, value)
    assert call.result() == [value, value]


def test_a_call_that_is_the_oldest_for_too_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    book = Book(stuck_seconds=8.0)
    book.send("first")
    book.send("second")
    for _ in range(4):
        assert book.ledger.tick() == 2.0
        assert book.asked == []
        now += 2.0
    book.ledger.tick()
    book.ledger.tick()
    assert book.asked == [("stuck", "first")]
    book.answer(1)
    for _ in range(5):
        book.ledger.tick()
        now += 2.0
    assert book.asked == [("stuck", "first"), ("stuck", "second")]


@pytest.mark.parametrize("limit", ["stuck_seconds", "settle_seconds"])
def test_a_pool_that_was_paused_as_a_whole_goes_on(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    book = Book(**{limit: 8.0})
    book.send("failed")
    book.fail(0, 1)
    book.ledger.tick()
    now += 3600.0
    for _ in range(3):
        assert book.ledger.tick() == 2.0
        assert book.asked == []
        now += 2.0
    book.ledger.tick()
    ends = {"stuck_seconds": ("stuck", "failed"), "settle_seconds": ("broke", WorkerError)}
    assert book.asked == [ends[limit]]
