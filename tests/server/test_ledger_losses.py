"""Calls and replies that are lost on their way: what follows them, and which calls fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.errors import WorkerError
from shm_broadcast import MessageDecodeError
from tests.server.book import Book, a_call

if TYPE_CHECKING:
    from server.calls.pending_call import PendingCall


def test_the_number_of_a_call_given_up_before_it_left_is_passed_over_by_a_void_call() -> None:
    book = Book()
    calls = [a_call() for _ in range(2)]
    for number, call in enumerate(calls, 1):
        assert book.ledger.accept(call, 1) == (number == 1)
        if number == 1:
            book.ledger.unsent(call)
            book.ledger.give_up(call)
            assert book.ledger.late(call) == []
            assert not call.done
    void = book.ledger.next_to_send(1)
    assert void is not None
    assert (void.is_void, void.number) == (True, 2)
    assert book.ledger.next_to_send(1) is calls[1]
    assert calls[1].number == 3
    assert book.ledger.next_to_send(1) is None


def test_one_void_call_passes_over_the_numbers_of_several() -> None:
    book = Book(in_flight=1)
    book.send()
    for _ in range(3):
        book.ledger.abandon(book.send())
    void = book.ledger.next_to_send(1)  # beyond `in_flight`: what it follows may never be answered
    assert void is not None
    assert (void.is_void, void.number) == (True, 2)
    assert book.ledger.queued.size == 2


def test_what_is_not_answered_before_a_void_call_is_lost() -> None:
    book = Book(in_flight=3)
    abandoned, kept = book.send(), book.send()
    book.ledger.abandon(abandoned)
    assert 1 in book.cancelled
    void = book.ledger.next_to_send(1)
    assert void is not None
    book.reply(0, 1, "a")
    book.reply(0, 2, "b")
    for rank in (0, 1):
        assert not kept.done
        book.reply(rank, void.number)
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: KeyboardInterrupt"):
        kept.result()
    assert abandoned.done
    assert book.ledger.queued.size == 0
    book.ledger.state.check()


def test_no_call_gets_the_answer_of_one_that_was_abandoned_after_it_was_sent() -> None:
    book = Book()
    abandoned = book.send()
    book.ledger.abandon(abandoned)
    later = book.send()
    for number in (1, 2):
        book.answer(number, number, number)
        if number == 1:
            assert book.ledger.next_to_send(1) is not None
            assert book.ledger.next_to_send(1) is later
            assert later.number == 3
    assert not later.done
    book.answer(3, "a", "b")
    assert later.result() == ["a", "b"]


def test_void_calls_are_not_what_a_rank_did_last_and_do_not_move_to_other_pools() -> None:
    book = Book(restartable=True)
    call = book.send("embed")
    book.answer(1)
    second = book.send("second")
    book.ledger.abandon(second)
    void = book.ledger.next_to_send(1)
    assert void is not None
    book.answer(void.number)
    assert call.done
    assert book.ledger.idle(0) == "second"
    book.ledger.abandon(book.send())
    book.send("third", retry=True)
    moved: list[PendingCall] = []

    def move(calls: list[PendingCall]) -> list[PendingCall]:
        moved.extend(calls)
        return []

    book.ledger.move = move
    book.lose_worker()
    assert [call.method for call in moved] == ["third"]


def test_what_an_interrupt_left_to_do_is_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another thread is still handed out while a later one has been answered."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    book = Book(in_flight=2, call_seconds=60.0)
    first, own, waiting = book.send("first"), book.send("own"), book.send()

    def answer_own(_: object) -> None:
        nonlocal now
        book.answer(own.number)
        now += 30.0
        book.ledger.abandon(waiting)

    first.future().add_done_callback(answer_own)
    book.answer(first.number)
    assert book.ledger.idle(0) == "own"
    assert book.ledger.due(waiting).at == 1060.0


def test_a_reply_that_an_interrupt_dropped_fails_its_call_only() -> None:
    book = Book()
    lost, kept = book.send(), book.send()
    book.reply(0, 1)
    book.reply(1, 2, "b")
    with pytest.raises(WorkerError, match="interrupted"):
        lost.result()
    book.reply(0, 2, "a")
    assert kept.result() == ["a", "b"]
    assert book.asked == []


def test_a_reply_that_an_interrupt_dropped_settles_a_call_that_has_failed_on_another_rank() -> None:
    """The next call's reply tells of it, so that call has to be sent meanwhile."""
    book = Book()
    book.send()
    book.fail(0, 1, "ValueError")
    later = book.send()
    book.reply(1, 2)
    assert ("resume", 0, 1) in book.asked
    book.reply(0, 2)
    assert later.done


def test_a_reply_that_cannot_be_decoded_fails_the_oldest_call_of_its_rank() -> None:
    book = Book()
    first, second = book.send(), book.send()
    book.reply(1, 1)
    book.ledger.garbled(0, MessageDecodeError("garbled"), 1)
    with pytest.raises(
        MessageDecodeError, match=r"the reply of rank 0 to .* cannot be read: garbled"
    ):
        first.result()
    assert not second.done
    assert book.asked == []
