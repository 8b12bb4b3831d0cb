"""The ledger's calls when a signal handler raises in the middle, or ends the pool and returns."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pytest

import server.calls
from server.calls.ledger import ignore
from server.errors import CallDivergedError, PoolClosedError, WorkerError, WorkerLostError
from tests.interruptions import interrupt, interruptions
from tests.server.book import Book, a_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.calls.pending_call import PendingCall

T = TypeVar("T")


def interrupted(
    prepare: Callable[[], tuple[Book, T]],
    act: Callable[[Book], object],
    handler: Callable[[Book], object] = interrupt,
) -> Iterator[tuple[str, Book, T]]:
    """Have ``act`` interrupted at each place of the pool's calls, on a newly prepared book each."""
    book, calls = prepare()

    def call() -> None:
        act(book)

    def signal() -> None:
        handler(book)

    for place in interruptions(call, server.calls, handler=signal):
        yield place, book, calls
        book, calls = prepare()


def at_work(
    prepare: Callable[[Book], object] = ignore, *, restartable: bool
) -> tuple[Book, list[PendingCall]]:
    """Three calls under way, and one that is queued; the last two may be made again."""
    book = Book(in_flight=3, restartable=restartable, ticks=False)
    calls = [book.send(), book.send(), a_call(retry=True), a_call(retry=True)]
    assert book.ledger.accept(calls[2], 1)
    book.ledger.queue(calls[3])
    for call in calls:
        call.future()
    prepare(book)
    return book, calls


def answer_last(book: Book) -> None:
    book.reply(1, 1, "one")


def close(book: Book) -> None:
    book.ledger.end(PoolClosedError("shut down"))


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_anywhere_in_the_taking_of_a_reply_leaves_nothing_half_done(
    fails: bool,
) -> None:
    """Who waits for one call takes the last answer to another one, and is interrupted there."""

    def prepared() -> tuple[Book, list[PendingCall]]:
        book = Book(in_flight=2, settle_seconds=0.0, ticks=False)
        calls = [book.send(), book.send()]
        calls[0].future()
        if fails:
            book.fail(0, 1)
        else:
            book.reply(0, 1, "zero")
        return book, calls

    taken = 0
    for _, book, (other, own) in interrupted(prepared, answer_last):
        book.ledger.abandon(own)
        void = book.ledger.next_to_send(1)
        assert void is not None
        book.reply(1, 2)
        book.reply(1, void.number)
        assert book.asked == [("resume", 0, 1)] * len(book.asked)
        assert bool(book.asked) == fails
        book.reply(0, 2)
        book.reply(0, void.number)
        if fails:
            with pytest.raises(WorkerError, match="rank 0 failed"):
                other.future().result(0)
        elif other.error is None:
            assert other.future().result(0) == ["zero", "one"]
            taken += 1
        else:
            with pytest.raises(WorkerError, match="interrupted"):
                other.future().result(0)
        book.ledger.tick()
        assert book.ledger.queued.size == 0
        assert book.ledger.queued.settling == []
        book.ledger.state.check()
    assert fails or taken > 10


@pytest.mark.parametrize("kind", ["ValueError", "PeerLostError"])
def test_a_tick_after_such_an_interrupt_does_not_break_the_pool(kind: str) -> None:
    """A call that one rank has failed is answered by the last; the ticking thread comes first."""

    def prepared() -> tuple[Book, list[PendingCall]]:
        book = Book(ticks=False)
        calls = [book.send(), book.send()]
        calls[0].future()
        book.fail(0, 1, kind, hearsay=kind == "PeerLostError")
        return book, calls

    for place, book, (other, own) in interrupted(prepared, answer_last):
        book.ledger.tick()
        book.ledger.state.check()
        book.ledger.abandon(own)
        if not other.settled:
            answer_last(book)
        with pytest.raises(WorkerError, match="rank 0 failed"):
            other.future().result(0)
        assert set(book.asked) == {("resume", 0, 1)}, place


def diverge(book: Book) -> None:
    book.reply(1, 1, operations=1)


BREAKS: dict[str, tuple[Callable[[Book], None], Callable[[Book], None], type[Exception]]] = {
    "a divergence": (lambda book: book.reply(0, 1), diverge, CallDivergedError),
    "one in a failed call": (lambda book: book.fail(0, 1), diverge, WorkerError),
    "a last failure": (lambda _: None, lambda book: book.fail(0, 1, final=True), WorkerError),
    "a lost worker": (lambda _: None, Book.lose_worker, WorkerLostError),
}


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize(("prepare", "broken", "error"), BREAKS.values(), ids=BREAKS)
def test_a_break_that_is_interrupted_anywhere_is_finished(
    prepare: Callable[[Book], None],
    broken: Callable[[Book], None],
    error: type[Exception],
    restartable: bool,
) -> None:
    """Who waits for one call takes what breaks the pool, and is interrupted there."""
    prepared = partial(at_work, prepare, restartable=restartable)
    places = []
    for place, book, (first, own, again, queued) in interrupted(prepared, broken):
        places.append(place)
        book.ledger.abandon(own)
        book.look()
        if not book.asked:
            broken(book)  # it had not begun
            book.look()
        assert book.asked == [("broke", error)]
        assert isinstance(first.future().exception(0), error)
        if restartable:
            book.ledger.open(2, book.cancelled.mark)
            sent = iter(partial(book.ledger.next_to_send, 2), None)
            assert [call for call in sent if not call.is_void] == [again, queued]
            for call in (again, queued):
                book.answer(call.number, 0, 1)
                assert call.future().result(0) == [0, 1]
        else:
            for call in (again, queued):
                assert isinstance(call.future().exception(0), error)
        assert book.asked == [("broke", error)]
        assert book.ledger.queued.size == 0
        assert book.ledger.queued.settling == []
    assert len(places) > 3


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize(("prepare", "broken", "error"), BREAKS.values(), ids=BREAKS)
def test_a_pool_may_be_shut_down_by_a_signal_handler_anywhere_while_it_breaks(
    prepare: Callable[[Book], None],
    broken: Callable[[Book], None],
    error: type[Exception],
    restartable: bool,
) -> None:
    prepared = partial(at_work, prepare, restartable=restartable)
    places = []
    for place, book, calls in interrupted(prepared, broken, handler=close):
        places.append(place)
        book.look()
        ended = PoolClosedError if restartable else (PoolClosedError, error)
        assert isinstance(book.ledger.state.ended, ended), place
        assert book.ledger.state.restarting is None
        for call in calls:
            assert isinstance(call.future().exception(0), PoolClosedError | error)
        assert book.ledger.queued.size == 0
        assert book.ledger.queued.settling == []
    assert len(places) > 3


@pytest.mark.parametrize("restartable", [False, True])
def test_what_broke_a_pool_is_told_though_it_is_shut_down_at_once(restartable: bool) -> None:
    book = Book(restartable=restartable, ticks=False)
    call = book.send()
    book.lose_worker()
    close(book)
    assert isinstance(call.future().exception(0), WorkerLostError)
    assert book.asked == [("broke", WorkerLostError)]
    ended = PoolClosedError if restartable else WorkerLostError
    assert isinstance(book.ledger.state.ended, ended)


def test_a_thread_that_no_signal_handler_interrupts_breaks_the_pool_itself() -> None:
    """The one that ticks may be held up."""
    book = Book(ticks=False)
    call = book.send()
    thread = threading.Thread(target=book.lose_worker)
    thread.start()
    thread.join()
    assert isinstance(call.future().exception(0), WorkerLostError)
    assert book.asked == [("broke", WorkerLostError)]


def test_an_interrupt_does_not_stop_the_time_of_a_failed_call() -> None:
    """It begins when all earlier calls were answered, which is interrupted."""

    def prepared() -> tuple[Book, PendingCall]:
        book = Book(settle_seconds=0.0, ticks=False)
        call, _ = book.send(), book.send()
        book.fail(0, 2)
        book.reply(0, 1)
        return book, call

    for _, book, call in interrupted(prepared, answer_last):
        book.ledger.abandon(call)
        if call.settled:
            book.look()
            assert book.asked == [("broke", WorkerError)]


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("noted", [False, True])
def test_a_shutdown_that_is_interrupted_anywhere_is_finished(noted: bool, helped: bool) -> None:
    """By the thread that ticks, once it has begun, or by a second one."""

    def prepared() -> tuple[Book, list[PendingCall]]:
        book, calls = at_work(restartable=True)
        if noted:
            book.lose_worker()
        return book, calls

    had = WorkerLostError if noted else PoolClosedError
    places, finished = [], 0
    for place, book, calls in interrupted(prepared, close):
        places.append(place)
        if helped:
            book.look()
            finished += all(call.future().done() for call in calls)
        close(book)
        errors = [type(call.future().exception(0)) for call in calls]
        assert errors == [had, had, PoolClosedError, PoolClosedError], place
        assert book.ledger.wait_until_idle(0)
        assert book.ledger.queued.settling == []
        assert book.asked in ([], [("broke", had)] if noted else [])
    assert len(places) > 20
    assert not helped or len(places) - finished < len(places) // 2


def test_no_call_that_may_be_moved_is_lost_by_an_interrupted_shutdown() -> None:
    """It fails with what broke the pool, or is moved: its caller does not wait for ever."""
    moved: list[PendingCall] = []

    def prepared() -> tuple[Book, list[PendingCall]]:
        book, calls = at_work(restartable=False)
        book.ledger.move = lambda calls: moved.extend(calls) or []
        book.lose_worker()
        return book, calls

    places = 0
    for place, book, calls in interrupted(prepared, close):
        places += 1
        book.look()
        close(book)
        assert all((call in moved) != call.future().done() for call in calls), place
        moved.clear()
    assert places > 20


def test_no_call_is_lost_on_its_way_to_another_pool() -> None:
    moved: list[PendingCall] = []

    def prepared() -> tuple[Book, list[PendingCall]]:
        book, calls = at_work(restartable=True)
        book.lose_worker()
        book.look()
        book.ledger.move = lambda calls: moved.extend(calls) or []
        return book, calls[2:]

    for place, book, waiting in interrupted(prepared, lambda book: book.ledger.move_on()):
        book.ledger.move_on()
        book.look()
        assert moved == waiting, place
        moved.clear()
