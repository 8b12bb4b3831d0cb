"""Serial executors and the progress engine, with tasks that a test ends by hand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from shm_broadcast import (
    Board,
    CoordinatorError,
    Deadline,
    DivergenceError,
    GroupAbortedError,
)
from shm_broadcast.executor import ProgressEngine, SerialExecutor
from tests.patience import until
from tests.refused_threads import refusing_threads
from tests.shm_broadcast.members import status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick


class ByHand:
    """A task that is done once ``may_end`` is set."""

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


class Interrupted(ByHand):
    """A task in the middle of which a signal handler raises, in the main thread."""

    def advance(self, spin_ns: int) -> bool:
        if self.may_end and not self._log:
            self._log.append("interrupted")
            raise KeyboardInterrupt
        return super().advance(spin_ns)


class Failed(ByHand):
    """It waits, fails, and has then nothing left to do."""

    def advance(self, spin_ns: int) -> bool:  # noqa: ARG002
        self._log.append("advanced")
        if len(self._log) == 2:
            raise DivergenceError(1, "this", "that")
        return len(self._log) > 2


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


@pytest.fixture
def lane(progress: ProgressEngine) -> SerialExecutor:
    return lane_of(progress)


def lane_of(
    progress: ProgressEngine, failures: list[CoordinatorError] | None = None
) -> SerialExecutor:
    return progress.executor(([] if failures is None else failures).append)


def behind(lane: SerialExecutor, task: ByHand) -> Any:
    """Submit a task to the background; return its handle."""
    handle = lane.submit(task, soon, background=True)
    assert handle is not None
    return handle


# --- order -----------------------------------------------------------------------------------


def test_tasks_end_in_order_while_the_caller_is_busy(board: Board, lane: SerialExecutor) -> None:
    log: list[str] = []
    tasks = [ByHand(log, name) for name in "abc"]
    handles = [behind(lane, task) for task in tasks]
    assert lane.handles
    for task in reversed(tasks):
        task.may_end = True
    board.notify(0)
    until(lambda: not lane.handles)
    assert log == ["a", "b", "c"]
    for handle in handles:
        assert handle.ready()
        handle.wait(soon())


# --- errors ----------------------------------------------------------------------------------


def test_an_error_ends_all_tasks_after_the_group_was_notified(progress: ProgressEngine) -> None:
    seen: list[tuple[bool, int, CoordinatorError]] = []
    executor = progress.executor(
        lambda error: seen.append((handles[0].done, len(executor.handles), error))
    )
    tasks = [ByHand([], name) for name in "ab"]
    handles = [behind(executor, task) for task in tasks]
    tasks[0].error = error = DivergenceError(1, "this", "that")
    for handle in handles:
        with pytest.raises(DivergenceError):
            handle.wait(soon())
    assert seen == [(False, 2, error)]
    assert not executor.handles


def test_an_abort_ends_every_task_with_its_own_operation(
    board: Board, progress: ProgressEngine
) -> None:
    handles = [behind(lane_of(progress), ByHand([], name)) for name in ("tp send", "tp recv")]
    board.abort("the reason")
    until(lambda: handles[0].done)  # by the background thread
    for handle, name in zip(handles, ("tp send", "tp recv"), strict=True):
        with pytest.raises(GroupAbortedError, match=rf"^{name}: .*the reason"):
            handle.wait(soon())


def test_a_task_that_was_interrupted_midway_is_never_done(
    progress: ProgressEngine, lane: SerialExecutor
) -> None:
    log: list[str] = []
    task = Interrupted(log, "a")
    handle = behind(lane, task)
    progress.close()  # this thread continues with it
    task.may_end = True
    with pytest.raises(KeyboardInterrupt):
        handle.wait(soon())
    with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
        handle.wait(soon())
    assert log == ["interrupted"]


def test_a_failed_task_is_never_done_for_another_thread(
    lane: SerialExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fail = lane.fail

    def fail_late(error: CoordinatorError) -> None:
        another = threading.Thread(target=lane.poll)
        another.start()
        another.join()
        fail(error)

    monkeypatch.setattr(lane, "fail", fail_late)
    handle = behind(lane, Failed(log, "a"))
    with pytest.raises(DivergenceError):
        handle.wait(soon())
    assert log == ["advanced", "advanced"]


def test_the_first_of_two_errors_counts_and_a_late_task_finds_the_abort(
    board: Board, progress: ProgressEngine
) -> None:
    late: list[BaseException] = []

    def on_failure(error: CoordinatorError) -> None:
        if isinstance(error, GroupAbortedError):
            return
        board.abort(error)
        with pytest.raises(GroupAbortedError) as caught:
            behind(executor, ByHand([], "late"))
        late.append(caught.value)
        assert board.aborted is not None
        executor.fail(
            GroupAbortedError("a", board.aborted)
        )  # as by the thread that the abort wakes

    executor = progress.executor(on_failure)
    handle = behind(executor, Failed([], "a"))
    with pytest.raises(DivergenceError):
        handle.wait(soon())
    until(lambda: len(late) == 1)


def test_a_peer_that_closes_while_its_message_is_received_is_not_lost() -> None:
    failures: list[CoordinatorError] = []
    with Board.create(2, 0) as board:
        peer = Board.attach(board.handle(), 1)
        progress = ProgressEngine(board)
        task = HalfWay([], "tp recv")
        handle = behind(lane_of(progress, failures), task)
        task.may_end = True
        board.notify(0)
        assert task.begun.wait(20), "the thread receives it"
        peer.close()
        threading.Timer(0.3, task.go_on.set).start()
        handle.wait(soon())
        progress.close()
    assert failures == []


def test_a_task_in_the_background_is_not_shown(board: Board, lane: SerialExecutor) -> None:
    """Its process may do something else: peers that wait for the process wait for that."""
    looks: list[int] = []

    class Watched(ByHand):
        def missing(self) -> tuple[int, ...]:
            looks.append(1)
            return (1,)

    task = Watched([], "a")
    handle = behind(lane, task)
    until(lambda: len(looks) > 6)
    assert status_of(board, 0).waits == ()
    task.may_end = True
    handle.wait(soon())


# --- the thread ------------------------------------------------------------------------------


@pytest.mark.parametrize("amid", ["lock", "push", "start"])
def test_a_signal_handler_may_close_it_amid(
    amid: str, progress: ProgressEngine, lane: SerialExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def close_behind(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == progress._name:
            progress.close()

    def close_within() -> None:
        if amid == "start":
            behind(lane, ByHand([], "a"))
        else:
            with progress._lock if amid == "lock" else lane.polling:
                progress.close()

    if amid == "push":
        behind(lane, ByHand([], "a"))
    if amid == "start":
        monkeypatch.setattr(threading.Thread, "start", close_behind)
    closing = threading.Thread(target=close_within, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    until(lambda: progress_threads() == 0)


def test_a_thread_that_cannot_check_ends_the_group(
    board: Board, lane: SerialExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    require = Mock(side_effect=OSError(24, "Too many open files"))
    monkeypatch.setattr(board, "require", require)
    handle = behind(lane, ByHand([], "a"))
    until(lambda: handle.done)
    assert isinstance(handle.error, GroupAbortedError)
    assert handle.error.failure.kind == "OSError"
    require.assert_called_once()


def test_tasks_without_a_thread_advance_in_waits(board: Board) -> None:
    log: list[str] = []
    task, later = ByHand(log, "a"), ByHand(log, "b")
    progress = ProgressEngine(board)
    with refusing_threads("progress"):
        lane_of(progress).submit(ByHand([], "x"), soon, background=True)
    progress.close()  # does not wait for a thread that was not started
    progress = ProgressEngine(board)
    lane = lane_of(progress)
    with refusing_threads("progress"):
        handle = behind(lane, task)
    task.may_end = True
    handle.wait(soon())
    assert log == ["a"]
    assert progress_threads() == 0
    behind(lane, later)
    assert progress_threads() == 1, "the next task has its thread"
    progress.close()
