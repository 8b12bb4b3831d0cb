"""Runs functions in threads that the interpreter does not wait for when it ends."""

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
    """Calls functions one after the other, in a thread of its own. Any thread may use it.

    Its thread begins with the first call, and ends when there has been none for a while: the next
    one has another thread. A forked child begins anew, without what the parent has asked for.

    Args:
        thread: the thread's name.
        idle: seconds that the thread waits for another call.
    """

    def __init__(self, thread: str, idle: float = _IDLE_SECONDS) -> None:
        self._thread = thread
        self._idle = idle
        self._begin_anew()

    def begin(self, do: Callable[[], T]) -> Future[T]:
        """Call ``do`` after all that was begun before.

        Returns:
            The future of what it returns or raises. If that is cancelled while others are under
            way, ``do`` is not called; once it is called, that cannot be cancelled.

        Raises:
            RuntimeError: no thread can be started; ``do`` is not called.
        """
        if self._process != os.getpid():
            self._begin_anew()
        future: Future[T] = Future()
        self._waiting.put((future, do))
        # The thread itself takes the lock: a signal handler that raises leaves none locked.
        if not self._serving.locked():
            try:
                threading.Thread(target=self._serve, name=self._thread, daemon=True).start()
            except RuntimeError:
                future.cancel()  # or the next call would make this one first
                raise
        return future

    def _begin_anew(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._serving = threading.Lock()
        self._process = os.getpid()

    def _serve(self) -> None:
        """Make the calls, unless another thread does."""
        while not self._waiting.empty() and self._serving.acquire(blocking=False):
            try:
                while True:
                    _carry_out(*self._waiting.get(timeout=self._idle))
            except Empty:
                self._serving.release()  # what came just now is seen by another look


def submit_in_thread(do: Callable[[], T], thread: str) -> Future[T]:
    """Call ``do`` in a new thread.

    Args:
        do: what to call.
        thread: the thread's name.

    Returns:
        The future of what it returns or raises; it cannot be cancelled once ``do`` is called.
    """
    return SingleThreadExecutor(thread, idle=0.0).begin(do)


def run_in_thread(do: Callable[[], None], name: str) -> None:
    """Call ``do`` in a new thread of that name, or in this one if none can be started."""
    try:
        threading.Thread(target=do, name=name, daemon=True).start()
    except RuntimeError:
        do()


def is_done_within(future: Future[Any], deadline: Deadline) -> bool:
    """Wait for ``future``, but at most `SLICE_SECONDS`; whether it has a result or an error."""
    try:
        future.exception(deadline.remaining(SLICE_SECONDS))
    except TimeoutError as error:
        if not is_future_timeout(error):
            raise
        return False
    return True


def is_future_timeout(error: TimeoutError) -> bool:
    """Whether waiting for a future was over by ``error``, and no signal handler has raised it, nor
    what the future is of.
    """
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    waits = Future.result.__code__, Future.exception.__code__
    return where is not None and where.tb_frame.f_code in waits


def _carry_out(future: Future[T], do: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    _under_way.add(future)
    try:
        result = do()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        _under_way.discard(future)
        del future, do  # the error has this frame: nothing is to be kept alive by it


@atexit.register
def _join_threads() -> None:
    """A thread that comes back from torch's C++ when the interpreter has ended would abort it."""
    wait([*_under_way], _ENDING_SECONDS)
