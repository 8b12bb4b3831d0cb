"""Run functions in daemon threads: the interpreter does not join them when it exits."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from shm_broadcast.deadline import Deadline
from shm_broadcast.eventcount import SLICE_SECONDS

T = TypeVar("T")

_IDLE_SECONDS: Final = 0.1
_ENDING_SECONDS: Final = 10 * SLICE_SECONDS
_under_way: Final[set[Future[Any]]] = set()
os.register_at_fork(after_in_child=_under_way.clear)


class SingleThreadExecutor:
    """Calls functions in order, in one thread of its own. Any thread may submit.

    The thread starts with the first call and exits after ``idle`` seconds without one; a later call
    starts another. A forked child starts with an empty queue.
    """

    def __init__(self, thread: str, idle: float = _IDLE_SECONDS) -> None:
        self._thread = thread
        self._idle = idle
        self._reset()

    def begin(self, do: Callable[[], T]) -> Future[T]:
        """Queue a call of ``do`` and return its future; a running call cannot be cancelled.

        Raises RuntimeError if no thread can be started; ``do`` is then not called.
        """
        if self._process != os.getpid():
            self._reset()
        future: Future[T] = Future()
        self._waiting.put((future, do))
        # The thread itself takes the lock: a signal handler that raises here leaves it free.
        if not self._serving.locked():
            try:
                threading.Thread(target=self._serve, name=self._thread, daemon=True).start()
            except RuntimeError:
                future.cancel()  # else the next call's thread would run it
                raise
        return future

    def _reset(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._serving = threading.Lock()
        self._process = os.getpid()

    def _serve(self) -> None:
        while not self._waiting.empty() and self._serving.acquire(blocking=False):
            try:
                while True:
                    _carry_out(*self._waiting.get(timeout=self._idle))
            except Empty:
                self._serving.release()  # the loop checks again for calls queued meanwhile


def submit_in_thread(do: Callable[[], T], thread: str) -> Future[T]:
    """Call ``do`` in a new thread and return its future; see `SingleThreadExecutor.begin`."""
    return SingleThreadExecutor(thread, idle=0.0).begin(do)


def run_in_thread(do: Callable[[], None], name: str) -> None:
    """Call ``do`` in a new thread of that name, or in this thread if none can be started."""
    try:
        threading.Thread(target=do, name=name, daemon=True).start()
    except RuntimeError:
        do()


def is_done_within(future: Future[Any], deadline: Deadline) -> bool:
    """Wait for ``future``, at most `SLICE_SECONDS`; return whether it is done."""
    return bool(wait([future], deadline.remaining(SLICE_SECONDS)).done)


def is_future_timeout(error: TimeoutError) -> bool:
    """Return whether ``error`` is the wait's own timeout, not raised by task or signal handler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    waiting_code = Future.result.__code__, Future.exception.__code__
    return trace is not None and trace.tb_frame.f_code in waiting_code


def _carry_out(future: Future[T], do: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    _under_way.add(future)
    try:
        result = do()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        _under_way.discard(future)
        del future, do  # the error's traceback holds this frame, which would keep them alive


@atexit.register
def _join_threads() -> None:
    """Wait for running calls: a thread that returns from torch's C++ after exit would abort."""
    wait([*_under_way], _ENDING_SECONDS)
