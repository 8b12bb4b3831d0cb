"""What answers to calls mean, decided without processes."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest

from server.calls.pending_call import PendingCall
from server.errors import (
    CallDivergedError,
    PoolClosedError,
    RestartLimitError,
    WorkerError,
    WorkerLostError,
)
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
    assert not book.ledger.busy


def test_nothing_holds_a_call_that_is_over_also_if_the_clock_looked_at_it_meanwhile() -> None:
    def answered(book: Book, call: PendingCall) -> None:
        book.reply(0, call.number)
        book.reply(1, call.number)

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


def test_a_failure_reaches_the_caller_at_once_and_its_rank_waits_for_the_others() -> None:
    book = Book()
    call = book.send()
    book.fail(1, 1, "ValueError")
    assert call.done
    assert book.asked == []
    with pytest.raises(WorkerError, match="rank 1 failed in embed: ValueError: text"):
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
        with pytest.raises(WorkerError, match="rank 1 failed in embed: ValueError"):
            refused()


def test_a_refusal_lets_ranks_go_on_only_if_they_began_the_same() -> None:
    book = Book()
    call = book.send()
    book.fail(1, 1, "CallRefusedError", operations=2, hearsay=True)
    book.fail(0, 1, "ValueError", operations=2)
    assert book.asked == [("resume", 1, 1), ("resume", 0, 1)]
    with pytest.raises(WorkerError, match="rank 0 failed in embed: ValueError"):
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
    expected = r"call 2 \(embed\): in group tp, rank 0 began 2 all_reduce where rank 1 began 1"
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
    book.reply(0, 1)
    book.reply(1, 1)
    book.ledger.tick()
    assert book.asked == [("broke", WorkerError)]
    assert second.done


def test_a_failure_that_overtakes_a_reply_leaves_it_alone() -> None:
    book = Book()
    first, second = book.send(), book.send()
    book.fail(0, 2, "ValueError")
    book.reply(0, 1, "a")
    book.reply(1, 1, "b")
    book.fail(1, 2, "ValueError")
    assert first.result() == ["a", "b"]
    assert second.done
    assert book.asked == [("resume", 0, 2), ("resume", 1, 2)]


def test_a_call_that_timed_out_on_its_way_gets_what_broke_the_pool() -> None:
    book = Book()
    call = PendingCall("embed", (), {}, 2, None)
    assert book.ledger.accept(call, 1)
    book.ledger.end(WorkerLostError(1, 4242, "killed by SIGKILL"))
    book.ledger.unsent(call)
    with pytest.raises(WorkerLostError):
        call.result()


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
    with pytest.raises(WorkerError, match="rank 1 failed in embed: ValueError"):
        call.result()


def test_hearsay_counts_when_there_is_nothing_better() -> None:
    book = Book()
    call = book.send()
    book.fail(0, 1, "PeerLostError", operations=1, hearsay=True)
    book.reply(1, 1)
    with pytest.raises(WorkerError, match="rank 0 failed in embed: PeerLostError"):
        call.result()
    assert book.asked == [("broke", WorkerError)]


def test_a_failure_that_aborted_the_board_breaks_the_pool_at_once() -> None:
    book = Book()
    book.send()
    book.fail(0, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.asked == []
    book.fail(1, 1, "DivergenceError", final=True)
    assert book.asked == [("broke", WorkerError)]
    with pytest.raises(WorkerError, match="rank 1 failed in embed: DivergenceError"):
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
    with pytest.raises(WorkerError, match="rank 1 failed in embed: DivergenceError"):
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
    with pytest.raises(WorkerError, match="rank 0 failed in embed: GroupAbortedError"):
        book.ledger.state.check()


def test_hearsay_is_not_handed_out_when_another_call_is_abandoned_while_the_reason_is_due() -> None:
    book = Book()
    book.ledger.reason_due = lambda: True
    early, late = book.send(), book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    book.ledger.abandon(late)
    assert not early.done
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
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
        with pytest.raises(WorkerError, match="rank 1 failed in embed: ValueError"):
            call.result()


def test_an_aborted_board_breaks_the_pool_though_all_have_answered() -> None:
    book = Book()
    book.send()
    for rank in (0, 1):
        book.fail(rank, 1, "GroupAbortedError", hearsay=True, final=True)
    assert book.asked == [("broke", WorkerError)]


def test_the_number_of_a_call_given_up_before_it_left_is_passed_over_by_a_void_call() -> None:
    book = Book()
    calls = [PendingCall("embed", (), {}, 2, None) for _ in range(2)]
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
    assert book.ledger.load == 2


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
    with pytest.raises(WorkerError, match="rank 1 failed in embed: KeyboardInterrupt"):
        kept.result()
    assert abandoned.done
    assert book.ledger.load == 0
    book.ledger.state.check()


def test_no_call_gets_the_answer_of_one_that_was_abandoned_after_it_was_sent() -> None:
    book = Book()
    abandoned = book.send()
    book.ledger.abandon(abandoned)
    later = book.send()
    for number in (1, 2):
        book.reply(0, number, number)
        book.reply(1, number, number)
        if number == 1:
            assert book.ledger.next_to_send(1) is not None
            assert book.ledger.next_to_send(1) is later
            assert later.number == 3
    assert not later.done
    book.reply(0, 3, "a")
    book.reply(1, 3, "b")
    assert later.result() == ["a", "b"]


def test_void_calls_are_not_what_a_rank_did_last_and_do_not_move_to_other_pools() -> None:
    book = Book(restartable=True)
    call = book.send("embed")
    book.reply(0, 1)
    book.reply(1, 1)
    second = book.send("second")
    book.ledger.abandon(second)
    void = book.ledger.next_to_send(1)
    assert void is not None
    for rank in (0, 1):
        book.reply(rank, void.number)
    assert call.done
    assert book.ledger.idle(0) == "second"
    book.ledger.abandon(book.send())
    book.send("third")
    moved: list[PendingCall] = []

    def move(calls: list[PendingCall]) -> list[PendingCall]:
        moved.extend(calls)
        return []

    book.ledger.move = move
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
    assert [call.method for call in moved] == ["third"]


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
    book.reply(0, 1)
    book.reply(1, 1)
    assert book.ledger.next_to_send(1) is calls[2]
    assert calls[2].number == 3
    book.reply(0, 2)
    book.reply(1, 2)
    assert book.ledger.next_to_send(1) is calls[3]


def test_a_call_waits_for_the_one_that_is_being_sent() -> None:
    book = Book(in_flight=2)
    first, second = (PendingCall("embed", (), {}, 2, None) for _ in range(2))
    assert book.ledger.accept(first, 1)
    assert not book.ledger.accept(second, 1, may_send=False)
    assert book.ledger.next_to_send(1) is second


def test_the_future_of_a_call_that_could_not_be_sent_gets_why() -> None:
    book = Book()
    call = PendingCall("embed", (), {}, 2, None)
    future = call.future()
    book.ledger.queue(call)
    assert book.ledger.next_to_send(1) is call
    book.ledger.abandon(call, TypeError("cannot pickle"))
    with pytest.raises(TypeError, match="cannot pickle"):
        future.result(timeout=0)


def test_a_queued_call_can_be_withdrawn_and_a_cancelled_one_is_skipped() -> None:
    book = Book(in_flight=1, call_seconds=60.0)
    first, withdrawn = book.send(), book.send()
    cancelled, last = (PendingCall("embed", (), {}, 2, None) for _ in range(2))
    assert cancelled.future().cancel()
    book.ledger.queue(cancelled)
    book.ledger.queue(last)
    for call in (withdrawn, first):
        book.ledger.give_up(call)
    assert book.ledger.late(withdrawn) == []
    assert book.ledger.late(first) == [0, 1]
    book.reply(0, 1)
    book.reply(1, 1)
    assert book.ledger.next_to_send(1) is last
    assert list(book.ledger._lateness._watched) == [last]  # what was cancelled is not kept


def test_a_call_that_nobody_waits_for_is_marked_while_it_is_under_way() -> None:
    book = Book(in_flight=2)
    first, second = book.send(), book.send()
    book.ledger.cancel(second)
    assert (1 in book.cancelled, 2 in book.cancelled) == (False, True)
    for number in (1, 2):
        book.reply(0, number)
        book.reply(1, number)
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
        for rank, value in enumerate(pair):
            book.reply(rank, number, value)
    assert [call.result() for call in calls[:2]] == [("a",), ("b",)]
    with pytest.raises(CallDivergedError) as raised:
        calls[2].result()
    assert str(raised.value) == (
        "call 3 (words): in group world, rank 0 ended the stream where rank 1 went on with it"
    )
    assert calls[3].result() is None
    assert book.ledger.state.ended is None


def test_what_an_interrupt_left_to_do_is_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another thread is still handed out while a later one has been answered."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    book = Book(in_flight=2, call_seconds=60.0)
    first, own, waiting = book.send("first"), book.send("own"), book.send()

    def answer_own(_: object) -> None:
        nonlocal now
        for rank in (0, 1):
            book.reply(rank, own.number)
        now += 30.0
        book.ledger.abandon(waiting)

    first.future().add_done_callback(answer_own)
    for rank in (0, 1):
        book.reply(rank, first.number)
    assert book.ledger.idle(0) == "own"
    assert book.ledger.due(waiting).at == 1060.0


def test_a_divergence_breaks_no_later_generation() -> None:
    """The pool is restarted, and a call given up, while the callback of a lost one still runs."""
    book = Book(restartable=True)
    diverging, lost = book.send(), book.send()

    def restart(_: object) -> None:
        book.ledger.open(2, book.cancelled)
        book.ledger.abandon(book.send())

    lost.future().add_done_callback(restart)
    for rank in (0, 1):
        book.reply(rank, diverging.number, operations=rank)
    assert book.asked == [("broke", CallDivergedError)]
    assert book.ledger.state.restarting is None


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


def test_a_call_is_not_sent_behind_one_that_others_may_hang_in() -> None:
    """A rank has failed it. It would be lost with that one, if the pool breaks."""
    book = Book()
    book.send()
    book.fail(0, 1, "ValueError")
    later = book.send()
    void = book.ledger.next_to_send(1)
    assert void is not None
    assert void.is_void
    assert book.ledger.next_to_send(1) is None
    book.reply(1, 1)
    assert ("resume", 0, 1) in book.asked
    assert book.ledger.next_to_send(1) is later


def test_a_reply_that_an_interrupt_dropped_settles_a_call_that_has_failed_on_another_rank() -> None:
    book = Book()
    book.send()
    book.fail(0, 1, "ValueError")
    void = book.ledger.next_to_send(1)
    assert void is not None
    book.reply(1, void.number)
    assert ("resume", 0, 1) in book.asked


def test_a_reply_that_cannot_be_decoded_fails_the_oldest_call_of_its_rank() -> None:
    book = Book()
    first, second = book.send(), book.send()
    book.reply(1, 1)
    book.ledger.garbled(0, MessageDecodeError("garbled"), 1)
    with pytest.raises(MessageDecodeError, match=r"what rank 0 answers to .* taken in: garbled"):
        first.result()
    assert not second.done
    assert book.asked == []


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
        book.reply(0, number)
        book.reply(1, number)
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
    book.reply(0, 1, value)
    book.reply(1, 1, value)
    assert call.result() == [value, value]


def test_a_pool_that_is_restarted_fails_what_the_workers_had_and_keeps_the_rest() -> None:
    book = Book(in_flight=3, restartable=True)
    had, again, third = (a_call(retry=retry) for retry in (False, True, True))
    for call in (had, again, third):
        assert book.ledger.accept(call, 1)
    queued = book.send()
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
    assert book.asked == [("broke", WorkerLostError)]
    with pytest.raises(WorkerLostError):
        had.result()
    assert not (again.done or third.done or queued.done)
    assert isinstance(book.ledger.state.restarting, WorkerLostError)
    assert book.ledger.state.restarts == 0
    assert book.ledger.state.ended is None
    later = book.send()
    assert book.ledger.next_to_send(1) is None
    book.ledger.open(2, book.cancelled)
    assert book.ledger.state.restarting is None
    assert book.ledger.state.restarts == 1
    for number, call in enumerate((again, third, queued), 4):
        assert book.ledger.next_to_send(2) is call
        assert call.number == number
    for number in (4, 5, 6):
        book.reply(0, number, "a")
        book.reply(1, number, "b")
    assert again.result() == third.result() == queued.result() == ["a", "b"]
    assert book.ledger.next_to_send(2) is later


def test_what_comes_late_from_an_earlier_generation_changes_nothing() -> None:
    book = Book(in_flight=1, restartable=True)
    again = a_call(retry=True)
    assert book.ledger.accept(again, 1)
    book.reply(0, 1, "old")
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
    book.ledger.open(2, book.cancelled)
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
        book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
        book.ledger.open(generation + 1, book.cancelled)
    with pytest.raises(WorkerLostError):
        call.result()


def test_a_future_survives_its_generation_and_can_then_not_be_cancelled() -> None:
    book = Book(restartable=True)
    call = a_call(retry=True)
    future = call.future()
    book.ledger.queue(call)
    assert book.ledger.next_to_send(1) is call
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
    assert not future.cancel()
    book.ledger.open(2, book.cancelled)
    assert book.ledger.next_to_send(2) is call
    book.reply(0, 2, "a")
    book.reply(1, 2, "b")
    assert future.result(timeout=0) == ["a", "b"]


def test_a_call_that_is_the_oldest_for_too_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    book = Book(stuck_seconds=8.0)
    book.send("first")
    book.send("second")
    assert book.ledger.tick() == 2.0
    now += 7.0
    book.ledger.tick()
    assert book.asked == []
    now += 1.0
    book.ledger.tick()
    book.ledger.tick()
    assert book.asked == [("stuck", "first")]
    book.reply(0, 1)
    book.reply(1, 1)
    book.ledger.tick()
    now += 8.0
    book.ledger.tick()
    assert book.asked == [("stuck", "first"), ("stuck", "second")]


def test_a_pool_that_is_not_restarted_any_more_fails_what_waits() -> None:
    book = Book(restartable=True)
    waiting = book.send()
    book.ledger.break_off(WorkerLostError(1, 4242, "killed by SIGKILL"))
    queued = book.send()
    book.ledger.end(RestartLimitError(5, 60.0, "lost"))
    with pytest.raises(WorkerLostError):
        waiting.result()
    for refused in (queued.result, book.ledger.state.check):
        with pytest.raises(RestartLimitError, match="after 5 restarts within 60 s"):
            refused()
