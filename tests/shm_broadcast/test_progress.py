"""Lanes and the thread that looks after them, with tasks that a test finishes by hand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from shm_broadcast import Board, CoordinatorError, Deadline, GroupAbortedError, GroupTimeoutError
from shm_broadcast.errors import DivergenceError
from shm_broadcast.executor import ProgressEngine, SerialExecutor
from tests.patience import until
from tests.refused_threads import refusing_threads
from tests.shm_broadcast.members import status_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class ByHand:
    """A task that is done once somebody says so."""

    def __init__(self, log: list[str], name: str) -> None:
        self.operation = name
        self.may_end = False
        self.error: CoordinatorError | None = None
        self._log = log

    def advance(self, spin_ns: int) -> bool:  # noqa: ARG002
        if self.error is not None:
            raise self.error
        if self.may_end:
            self._log.append(self.operation)
        return self.may_end

    def ready(self) -> bool:
        return self.may_end or self.error is not None

    def missing(self) -> tuple[int, ...]:
        return (1,)


def progress_threads() -> int:
    return sum(thread.name == "progress" for thread in threading.enumerate())


@pytest.fixture
def board() -> Iterator[Board]:
    with Board.create(2, 0) as mine, Board.attach(mine.handle(), 1):
        yield mine


@pytest.fixture
def progress(board: Board) -> Iterator[ProgressEngine]:
    made = ProgressEngine(board)
    yield made
    made.close()


def soon() -> Deadline:
    return Deadline.after(20)


def lane_of(
    progress: ProgressEngine, failures: list[CoordinatorError] | None = None
) -> SerialExecutor:
    return progress.executor(([] if failures is None else failures).append)


def test_what_needs_no_waiting_is_done_at_once(progress: ProgressEngine) -> None:
    log: list[str] = []
    task = ByHand(log, "a")
    task.may_end = True
    lane = lane_of(progress)
    assert lane.submit(task, soon, background=True) is None
    assert log == ["a"]
    assert not lane.handles
    assert progress_threads() == 0, "no thread was needed"


def test_tasks_end_in_order_while_the_caller_is_busy(
    board: Board, progress: ProgressEngine
) -> None:
    log: list[str] = []
    tasks = [ByHand(log, name) for name in "abc"]
    lane = lane_of(progress)
    tickets = [lane.submit(task, soon, background=True) for task in tasks]
    assert lane.handles
    for task in reversed(tasks):
        task.may_end = True
    board.notify(0)
    until(lambda: not lane.handles)
    assert log == ["a", "b", "c"]
    for ticket in tickets:
        assert ticket is not None
        assert ticket.ready()
        ticket.wait(soon())


def test_lanes_do_not_wait_for_each_other(progress: ProgressEngine) -> None:
    log: list[str] = []
    stuck, free = ByHand(log, "stuck"), ByHand(log, "free")
    first, second = lane_of(progress), lane_of(progress)
    blocked = first.submit(stuck, soon, background=True)
    ticket = second.submit(free, soon, background=True)
    free.may_end = True
    assert ticket is not None
    ticket.wait(soon())
    assert log == ["free"]
    assert blocked is not None
    assert not blocked.ready()


def test_a_deadline_leaves_the_task_under_way(progress: ProgressEngine) -> None:
    log: list[str] = []
    task = ByHand(log, "tp all_reduce")
    ticket = lane_of(progress).submit(task, soon, background=True)
    assert ticket is not None
    with pytest.raises(GroupTimeoutError) as raised:
        ticket.wait(Deadline.after(0.05))
    assert [member.rank for member in raised.value.waiting_for] == [1]
    task.may_end = True
    ticket.wait(soon())


def test_a_foreground_task_waits_behind_those_under_way(progress: ProgressEngine) -> None:
    log: list[str] = []
    before, after = ByHand(log, "before"), ByHand(log, "after")
    lane = lane_of(progress)
    lane.submit(before, soon, background=True)
    after.may_end = True
    ticket = lane.submit(after, soon, background=False)
    assert ticket is not None
    assert log == []
    before.may_end = True
    ticket.wait(soon())
    assert log == ["before", "after"]


def test_an_error_ends_all_behind_it_and_is_told(progress: ProgressEngine) -> None:
    log: list[str] = []
    failures: list[CoordinatorError] = []
    tasks = [ByHand(log, name) for name in "ab"]
    lane = lane_of(progress, failures)
    tickets = [lane.submit(task, soon, background=True) for task in tasks]
    error = DivergenceError(1, "this", "that")
    tasks[0].error = error
    for ticket in tickets:
        assert ticket is not None
        with pytest.raises(DivergenceError):
            ticket.wait(soon())
    until(lambda: failures == [error])
    assert not lane.handles


def test_tasks_have_not_ended_before_the_group_is_told(progress: ProgressEngine) -> None:
    """Or whoever finds its task ended, and begins another, finds no reason for what that meets."""
    seen: list[tuple[bool, int]] = []
    task = ByHand([], "a")
    lane = progress.executor(lambda _: seen.append((ticket.done, len(lane.handles))))
    ticket: Any = lane.submit(task, soon, background=True)
    task.error = DivergenceError(1, "this", "that")
    until(ticket.ready)
    assert seen == [(False, 1)]
    assert not lane.handles


def test_an_abort_ends_everything(board: Board, progress: ProgressEngine) -> None:
    tickets = [lane_of(progress).submit(ByHand([], name), soon, background=True) for name in "ab"]
    board.abort("the reason")
    for ticket in tickets:
        assert ticket is not None
        with pytest.raises(GroupAbortedError, match="the reason"):
            ticket.wait(soon())


def test_an_abort_is_told_of_the_lanes_own_operation(
    board: Board, progress: ProgressEngine
) -> None:
    ticket: Any = lane_of(progress).submit(ByHand([], "tp send"), soon, background=True)
    board.abort("the reason")
    until(lambda: ticket.done)  # the background thread has noticed
    with pytest.raises(GroupAbortedError, match=r"^tp send: .*the reason"):
        ticket.wait(soon())


def test_close_ends_the_thread_and_waiters_go_on(progress: ProgressEngine) -> None:
    task = ByHand([], "a")
    ticket = lane_of(progress).submit(task, soon, background=True)
    progress.close()
    progress.close()
    assert progress_threads() == 0
    task.may_end = True
    assert ticket is not None
    ticket.wait(soon())


def test_a_signal_handler_may_close_it_while_its_thread_has_the_lock(
    progress: ProgressEngine,
) -> None:
    def close_within() -> None:
        with progress._lock:
            progress.close()

    closing = threading.Thread(target=close_within, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_a_signal_handler_may_close_it_in_the_middle_of_a_push(progress: ProgressEngine) -> None:
    lane = lane_of(progress)
    lane.submit(ByHand([], "a"), soon, background=True)

    def close_within() -> None:
        with lane.polling:
            progress.close()

    closing = threading.Thread(target=close_within, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    until(lambda: progress_threads() == 0)


def test_a_signal_handler_may_close_it_while_the_thread_is_started(
    progress: ProgressEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Thread.start

    def close_behind(thread: threading.Thread) -> None:
        started(thread)
        if thread.name == progress._name:
            progress.close()

    monkeypatch.setattr(threading.Thread, "start", close_behind)
    task = ByHand([], "a")
    lane = lane_of(progress)
    beginning = threading.Thread(
        target=lambda: lane.submit(task, soon, background=True), daemon=True
    )
    beginning.start()
    beginning.join(20)
    assert not beginning.is_alive()
    until(lambda: progress_threads() == 0)


def test_a_thread_that_cannot_look_ends_the_group(
    board: Board, progress: ProgressEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def require(*_: object) -> None:
        nonlocal looks
        looks += 1
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(board, "require", require)
    ticket = lane_of(progress).submit(ByHand([], "a"), soon, background=True)
    assert ticket is not None
    until(lambda: ticket.done)
    assert isinstance(ticket.error, GroupAbortedError)
    assert ticket.error.failure.kind == "OSError"
    assert looks == 1


class Interrupted(ByHand):
    """A task in the middle of which a signal handler raises, in the main thread."""

    def advance(self, spin_ns: int) -> bool:
        if self.may_end and not self._log:
            self._log.append("interrupted")
            raise KeyboardInterrupt
        return super().advance(spin_ns)


def test_a_task_that_was_interrupted_midway_is_never_done(progress: ProgressEngine) -> None:
    """Nobody knows how far it has come: to go on with it may give what was never received."""
    log: list[str] = []
    task = Interrupted(log, "a")
    ticket = lane_of(progress).submit(task, soon, background=True)
    assert ticket is not None
    progress.close()  # this thread goes on with it
    task.may_end = True
    with pytest.raises(KeyboardInterrupt):
        ticket.wait(soon())
    with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
        ticket.wait(soon())
    assert log == ["interrupted"]


class Failed(ByHand):
    """It waits, fails, and has then nothing left to do."""

    def advance(self, spin_ns: int) -> bool:  # noqa: ARG002
        self._log.append("advanced")
        if len(self._log) == 2:
            raise DivergenceError(1, "this", "that")
        return len(self._log) > 2


def test_a_task_that_failed_is_never_done_whoever_looks_before_that_is_told(
    progress: ProgressEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    lane = lane_of(progress)
    fail = lane.fail

    def fail_late(error: CoordinatorError) -> None:
        another = threading.Thread(target=lane.poll)
        another.start()
        another.join()
        fail(error)

    monkeypatch.setattr(lane, "fail", fail_late)
    ticket = lane.submit(Failed(log, "a"), soon, background=True)
    assert ticket is not None
    with pytest.raises(DivergenceError):
        ticket.wait(soon())
    assert log == ["advanced", "advanced"]


def test_what_comes_while_a_lane_fails_finds_the_group_aborted(
    board: Board, progress: ProgressEngine
) -> None:
    late: list[BaseException | None] = []

    def told(error: CoordinatorError) -> None:
        board.abort(error)
        with pytest.raises(GroupAbortedError) as caught:
            lane.submit(ByHand([], "late"), soon, background=True)
        late.append(caught.value)

    lane = progress.executor(told)
    ticket = lane.submit(Failed([], "a"), soon, background=True)
    assert ticket is not None
    with pytest.raises(DivergenceError):
        ticket.wait(soon())
    until(lambda: len(late) == 1)


def test_the_first_of_two_errors_counts(board: Board, progress: ProgressEngine) -> None:
    """The other one only says that the group was aborted, because of the first."""

    def told(error: CoordinatorError) -> None:
        if not isinstance(error, GroupAbortedError):
            board.abort(error)
            assert board.aborted is not None
            # as the background thread does, which the abort wakes
            lane.fail(GroupAbortedError("a", board.aborted))

    lane = progress.executor(told)
    ticket = lane.submit(Failed([], "a"), soon, background=True)
    assert ticket is not None
    with pytest.raises(DivergenceError):
        ticket.wait(soon())


class HalfWay(ByHand):
    """A task that takes its time once it may end."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__(log, name)
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def advance(self, spin_ns: int) -> bool:
        if self.may_end:
            self.begun.set()
            self.go_on.wait(20)
        return super().advance(spin_ns)


def test_a_peer_that_leaves_while_its_message_is_taken_in_is_not_lost() -> None:
    failures: list[CoordinatorError] = []
    with Board.create(2, 0) as board:
        peer = Board.attach(board.handle(), 1)
        progress = ProgressEngine(board)
        task = HalfWay([], "tp recv")
        ticket = lane_of(progress, failures).submit(task, soon, background=True)
        assert ticket is not None
        task.may_end = True
        board.notify(0)
        assert task.begun.wait(20), "the thread takes it in"
        peer.close()
        threading.Timer(0.3, task.go_on.set).start()
        ticket.wait(soon())
        progress.close()
    assert failures == []


def test_what_runs_in_the_background_is_not_shown(board: Board, progress: ProgressEngine) -> None:
    """Its process may do something else meanwhile: others that wait for it wait for that."""
    looks: list[int] = []

    class Watched(ByHand):
        def missing(self) -> tuple[int, ...]:
            looks.append(1)
            return (1,)

    task = Watched([], "a")
    ticket = lane_of(progress).submit(task, soon, background=True)
    assert ticket is not None
    until(lambda: len(looks) > 6)
    assert status_of(board, 0).waits == ()
    task.may_end = True
    ticket.wait(soon())


def test_where_no_thread_can_be_started_tasks_advance_when_somebody_waits(board: Board) -> None:
    log: list[str] = []
    task, later = ByHand(log, "a"), ByHand(log, "b")
    progress = ProgressEngine(board)
    lane = lane_of(progress)
    with refusing_threads("progress"):
        ticket = lane.submit(task, soon, background=True)
    task.may_end = True
    assert ticket is not None
    ticket.wait(soon())
    assert log == ["a"]
    assert progress_threads() == 0
    lane.submit(later, soon, background=True)
    assert progress_threads() == 1, "the next task has its thread"
    progress.close()


def test_a_thread_that_could_not_be_started_is_not_waited_for(board: Board) -> None:
    progress = ProgressEngine(board)
    with refusing_threads("progress"):
        lane_of(progress).submit(ByHand([], "a"), soon, background=True)
    progress.close()
