"""Calls that ranks fail, or differ in: who may go on, and what breaks the pool."""

from __future__ import annotations

import math

import pytest

from server.errors import CallDivergedError, WorkerError, WorkerLostError
from tests.server.book import Book


def test_a_failure_reaches_the_caller_at_once_and_its_rank_waits_for_the_others() -> None:
    book = Book()
    call = book.send()
    book.fail(1, 1, "ValueError")
    assert call.done
    assert book.asked == []
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError: text"):
        call.result()
    book.fail(0, 1, "KeyError")
    assert book.asked == [("resume", 1, 1), ("resume", 0, 1)]
    book.ledger.state.check()


def test_a_rank_may_go_on_when_the_others_succeeded_with_as_many_operations() -> None:
    book = Book()
    book.send()
    book.fail(1, 1, operations=3)
    book.reply(0, 1, operations=3)
    assert book.asked == [("resume", 1, 1)]


def test_the_pool_breaks_when_operations_were_left_half_done() -> None:
    book = Book()
    book.send()
    later = book.send()
    book.fail(1, 1, "ValueError")
    book.reply(0, 1, operations=1)
    assert book.asked == [("broke", WorkerError)]
    for refused in (later.result, book.ledger.state.check, book.send):
        with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError"):
            refused()


def test_a_refusal_lets_ranks_go_on_only_if_they_began_the_same() -> None:
    book = Book()
    call = book.send()
    book.fail(1, 1, "CallRefusedError", operations=2, hearsay=True)
    book.fail(0, 1, "ValueError", operations=2)
    assert book.asked == [("resume", 1, 1), ("resume", 0, 1)]
    with pytest.raises(WorkerError, match=r"rank 0 .*embed: ValueError"):
        call.result()
    book.send()
    book.fail(1, 2, "CallRefusedError", operations=2, hearsay=True)
    book.fail(0, 2, "ValueError", operations=1)
    assert book.asked[2:] == [("broke", WorkerError)]


def test_a_call_in_which_ranks_differ_fails_and_no_later_one_is_answered() -> None:
    """Rank 0 is a call ahead: what it left out, rank 1 took from the next call."""
    book = Book(in_flight=3)
    first, second, third = (book.send() for _ in range(3))
    for number in (1, 2):
        book.reply(0, number, "a", operations=2)
    book.reply(1, 1, "b", operations=2)
    assert first.result() == ["a", "b"]
    book.reply(0, 3, "a", operations=1)
    book.reply(1, 2, "b", operations=1)
    expected = r"call 2 \(embed\): in group tp, rank 0 began all_reduce .* where rank 1 began 1"
    for refused in (second.result, third.result, book.ledger.state.check, book.send):
        with pytest.raises(CallDivergedError, match=expected):
            refused()
    assert book.asked == [("broke", CallDivergedError)]
    book.reply(1, 3, "b", operations=1)
    with pytest.raises(CallDivergedError):
        third.result()


def test_a_rank_that_meets_others_is_told_with_the_calls_under_way() -> None:
    book = Book()
    first, _ = book.send("forward"), book.send("backward")
    book.fail(1, 1, "DivergenceError", diverged=True, final=True)
    expected = r"text \(under way: call 1 \(forward\), call 2 \(backward\)\)"
    with pytest.raises(WorkerError, match=expected):
        first.result()


def test_a_failed_call_is_overdue_only_after_all_calls_before_it() -> None:
    book = Book(settle_seconds=0.0)
    book.send()
    second = book.send()
    book.fail(0, 2)
    assert book.ledger.tick() == math.inf
    book.answer(1)
    book.ledger.tick()
    assert book.asked == [("broke", WorkerError)]
    assert second.done


def test_a_failure_that_overtakes_a_reply_leaves_it_alone() -> None:
    book = Book()
    first, second = book.send(), book.send()
    book.fail(0, 2, "ValueError")
    book.answer(1, "a", "b")
    book.fail(1, 2, "ValueError")
    assert first.result() == ["a", "b"]
    assert second.done
    assert book.asked == [("resume", 0, 2), ("resume", 1, 2)]


def test_the_pool_breaks_when_the_others_do_not_answer_in_time() -> None:
    book = Book(settle_seconds=0.0)
    book.send()
    assert book.ledger.tick() == math.inf
    book.fail(1, 1, "ValueError")
    book.ledger.tick()
    assert book.asked == [("broke", WorkerError)]


def test_the_next_failed_call_is_overdue_after_the_first_is_settled() -> None:
    book = Book()
    book.send()
    assert book.ledger.tick() == math.inf
    book.fail(1, 1)
    assert 0 < book.ledger.tick() <= 60
    book.fail(0, 1)
    assert book.ledger.tick() == math.inf


def test_hearsay_of_a_failure_gives_way_to_the_failure() -> None:
    book = Book()
    call = book.send()
    book.fail(0, 1, "PeerLostError", hearsay=True)
    assert not call.done
    book.fail(1, 1, "ValueError")
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError"):
        call.result()


def test_hearsay_counts_when_there_is_nothing_better() -> None:
    book = Book()
    call = book.send()
    book.fail(0, 1, "PeerLostError", operations=1, hearsay=True)
    book.reply(1, 1)
    with pytest.raises(WorkerError, match=r"rank 0 .*embed: PeerLostError"):
        call.result()
    assert book.asked == [("broke", WorkerError)]


def test_a_failure_that_aborted_the_board_breaks_the_pool_at_once() -> None:
    book = Book()
    book.send()
    book.fail(0, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.asked == []
    book.fail(1, 1, "DivergenceError", final=True)
    assert book.asked == [("broke", WorkerError)]
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: DivergenceError"):
        book.ledger.state.check()


def test_hearsay_does_not_break_the_pool_while_the_reason_is_due() -> None:
    book = Book(settle_seconds=0.0)
    due = [True]
    book.ledger.reason_due = lambda: due[0]
    early, late = book.send(), book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.ledger.tick() == math.inf
    assert not early.done
    book.fail(1, 2, "DivergenceError", final=True)
    assert book.asked == [("broke", WorkerError)]
    with pytest.raises(WorkerError, match=r"rank 1 .*embed: DivergenceError"):
        late.result()


def test_hearsay_breaks_the_pool_once_no_reason_is_due() -> None:
    book = Book()
    due = [True]
    book.ledger.reason_due = lambda: due[0]
    book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.ledger.tick() == math.inf
    due[0] = False
    book.ledger.tick()
    assert book.asked == [("broke", WorkerError)]
    with pytest.raises(WorkerError, match=r"rank 0 .*embed: GroupAbortedError"):
        book.ledger.state.check()


def test_hearsay_is_not_handed_out_when_another_call_is_abandoned_while_the_reason_is_due() -> None:
    book = Book()
    book.ledger.reason_due = lambda: True
    early, late = book.send(), book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    book.ledger.abandon(late)
    assert not early.done
    book.lose_worker()
    with pytest.raises(WorkerLostError):
        early.result()
    assert book.asked == [("broke", WorkerLostError)]


def test_hearsay_is_not_handed_out_when_the_rank_that_aborted_has_answered_before() -> None:
    """It aborts the board in the next call, and reports that."""
    book = Book()
    book.ledger.reason_due = lambda: True
    early, late = book.send(), book.send()
    book.fail(0, 1, "GroupAbortedError", hearsay=True, final=True)
    book.reply(1, 1)
    assert not early.done
    book.fail(1, 2, "ValueError", final=True)
    for call in (early, late):
        with pytest.raises(WorkerError, match=r"rank 1 .*embed: ValueError"):
            call.result()


def test_an_aborted_board_breaks_the_pool_though_all_have_answered() -> None:
    book = Book()
    book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.asked == [("broke", WorkerError)]
