"""A pool that is restarted when it breaks: which calls fail, wait, or are made again."""

from __future__ import annotations

import pytest

from server.errors import CallDivergedError, RestartLimitError, WorkerError, WorkerLostError
from shm_broadcast import MessageDecodeError
from tests.server.book import Book, a_call


def test_a_divergence_breaks_no_later_generation() -> None:
    """The pool is restarted, and a call given up, while the callback of a lost one still runs."""
    book = Book(restartable=True)
    diverging, lost = book.send(), book.send()

    def restart(_: object) -> None:
        book.ledger.open(2, book.cancelled.mark)
        book.ledger.abandon(book.send())

    lost.future().add_done_callback(restart)
    for rank in (0, 1):
        book.reply(rank, diverging.number, operations=rank)
    assert book.asked == [("broke", CallDivergedError)]
    assert book.ledger.state.restarting is None


def test_a_pool_that_is_restarted_fails_all_calls_but_those_that_may_be_made_again() -> None:
    book = Book(in_flight=3, restartable=True)
    had, again, third = (a_call(retry=retry) for retry in (False, True, True))
    for call in (had, again, third):
        assert book.ledger.accept(call, 1)
    not_sent, queued = book.send(), book.send(retry=True)
    book.lose_worker()
    assert book.asked == [("broke", WorkerLostError)]
    for lost in (had, not_sent):
        with pytest.raises(WorkerLostError, match="rank 1"):
            lost.result()
    assert not (again.done or third.done or queued.done)
    assert isinstance(book.ledger.state.restarting, WorkerLostError)
    assert book.ledger.state.restarts == 0
    assert book.ledger.state.ended is None
    later = book.send()
    assert book.ledger.next_to_send(1) is None
    book.ledger.open(2, book.cancelled.mark)
    assert book.ledger.state.restarting is None
    assert book.ledger.state.restarts == 1
    for number, call in enumerate((again, third, queued), 4):
        assert book.ledger.next_to_send(2) is call
        assert call.number == number
    for number in (4, 5, 6):
        book.answer(number, "a", "b")
    assert again.result() == third.result() == queued.result() == ["a", "b"]
    assert book.ledger.next_to_send(2) is later


def test_what_comes_late_from_an_earlier_generation_changes_nothing() -> None:
    book = Book(in_flight=1, restartable=True)
    again = a_call(retry=True)
    assert book.ledger.accept(again, 1)
    book.reply(0, 1, "old")
    book.lose_worker()
    book.ledger.open(2, book.cancelled.mark)
    assert book.ledger.next_to_send(2) is again
    waiting = book.send()
    book.reply(1, 1, "old")
    book.ledger.garbled(0, MessageDecodeError("garbled"), 1)
    book.ledger.break_off(WorkerLostError(0, 4241, "killed by SIGKILL"), generation=1)
    assert not book.ledger.accept(a_call(), 1)
    assert not waiting.done
    book.reply(0, 2, "a")
    assert not again.done
    book.reply(1, 2, "b")
    assert again.result() == ["a", "b"]


def test_a_call_is_made_three_times_at_most() -> None:
    book = Book(restartable=True)
    call = a_call(retry=True)
    book.ledger.queue(call)
    for generation in (1, 2, 3):
        assert not call.done
        assert book.ledger.next_to_send(generation) is call
        book.lose_worker()
        book.ledger.open(generation + 1, book.cancelled.mark)
    with pytest.raises(WorkerLostError):
        call.result()


def test_only_the_times_that_workers_had_a_call_count() -> None:
    book = Book(in_flight=1, restartable=True)
    before, queued = a_call(retry=True), a_call(retry=True)
    for call in (before, queued):
        book.ledger.queue(call)
    for generation in (1, 2, 3):
        assert book.ledger.next_to_send(generation) is before
        book.lose_worker()
        book.ledger.open(generation + 1, book.cancelled.mark)
    assert before.done
    assert book.ledger.next_to_send(4) is queued
    book.answer(4, "a", "b")
    assert queued.result() == ["a", "b"]


def test_the_error_of_a_call_that_may_be_made_again_waits_for_the_calls_before_it() -> None:
    """One of them may be the cause: then the call is made again."""
    for breaks in (False, True):
        book = Book(in_flight=3, restartable=True)
        first, unasked, again = book.send(), book.send(), book.send(retry=True)
        for call in (unasked, again):
            book.fail(1, call.number)
        assert (unasked.done, again.done) == (True, False)
        for rank in (0, 1):
            book.reply(rank, first.number, operations=rank if breaks else 0)
        assert not again.done
        if breaks:
            assert book.asked == [("broke", CallDivergedError)]
            book.ledger.open(2, book.cancelled.mark)
            assert book.ledger.next_to_send(2) is again
            book.answer(again.number, "a", "b")
            assert again.result() == ["a", "b"]
        else:
            book.reply(0, unasked.number)
            assert again.done
            with pytest.raises(WorkerError, match="rank 1 failed"):
                again.result()


def test_a_future_survives_its_generation_and_can_then_not_be_cancelled() -> None:
    book = Book(restartable=True)
    call = a_call(retry=True)
    future = call.future()
    book.ledger.queue(call)
    assert book.ledger.next_to_send(1) is call
    book.lose_worker()
    assert not future.cancel()
    book.ledger.open(2, book.cancelled.mark)
    assert book.ledger.next_to_send(2) is call
    book.answer(2, "a", "b")
    assert future.result(timeout=0) == ["a", "b"]


def test_a_pool_that_is_not_restarted_any_more_fails_what_waits() -> None:
    book = Book(restartable=True)
    had = book.send()
    book.lose_worker()
    waiting = book.send()
    book.ledger.end(RestartLimitError(5, 60.0, "lost"))
    with pytest.raises(WorkerLostError):
        had.result()
    for refused in (waiting.result, book.ledger.state.check):
        with pytest.raises(RestartLimitError, match="after 5 restarts within 60 s"):
            refused()
