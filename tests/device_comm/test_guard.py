from __future__ import annotations

import gc
import threading
import weakref

import pytest

from device_comm import LoneWatch
from device_comm.torch_waiting import BlockingCallWatchdog, ErrorTranslator
from shm_broadcast import NEVER, Deadline, GroupAbortedError, GroupTimeoutError
from tests.patience import until
from tests.shm_broadcast.queues import Running


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "guard-test"]


class Call:
    """A call that blocks until it is ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __call__(self) -> None:
        assert self.ended.wait(10)
        raise RuntimeError("ended")

    def end(self, _: Exception) -> None:
        self.ended.set()


def test_an_abort_ends_the_call_and_is_what_it_raises() -> None:
    watch, call = LoneWatch(0), Call()
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(watch), call.end)
    threading.Timer(0.1, watch.abort, (KeyError("why"),)).start()
    with pytest.raises(GroupAbortedError, match="why") as caught:
        guard.call(call, "receiving", [1], NEVER)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_deadline_ends_the_call_and_is_what_it_raises() -> None:
    call = Call()
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(LoneWatch(0)), call.end)
    with pytest.raises(GroupTimeoutError, match=r"receiving: timed out after 0\.1 s"):
        guard.call(call, "receiving", [1], Deadline.after(0.1))


def test_what_the_call_raises_by_itself_is_left_alone() -> None:
    call = Call()
    call.ended.set()
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(LoneWatch(0)), call.end)
    with pytest.raises(RuntimeError, match="ended"):
        guard.call(call, "receiving", [1], NEVER)


def test_a_call_that_cannot_be_watched_over_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    boundary, call = ErrorTranslator(LoneWatch(0)), Call()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(boundary, "wait", refuse)
        guard = BlockingCallWatchdog("guard-test", boundary, call.end)
        with pytest.raises(OSError, match="Too many open files"):
            guard.call(call, "receiving", [1], NEVER)
    guard.call(int, "receiving", [1], NEVER)


def test_one_thread_for_many_calls_that_leaves_when_there_are_none() -> None:
    before = len(threads())
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(LoneWatch(0)), id)
    for _ in range(100):
        guard.call(int, "receiving", [1], NEVER)
    assert len(threads()) <= before + 1
    until(lambda: not threads())
    done = []
    guard.call(lambda: done.append(len(threads())), "receiving", [1], NEVER)
    assert done == [1]


def test_the_thread_of_a_closed_guard_ends() -> None:
    guard = BlockingCallWatchdog("guard-closed", ErrorTranslator(LoneWatch(0)), id)
    guard.call(int, "receiving", [1], NEVER)
    for _ in range(2):
        guard.close()
        assert "guard-closed" not in {thread.name for thread in threading.enumerate()}


def test_a_guard_that_is_closed_watches_over_the_call_that_is_under_way() -> None:
    watch, call = LoneWatch(0), Call()
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(watch), call.end)
    calling = Running(guard.call, call, "receiving", [1], NEVER)
    until(threads)
    guard.close()
    watch.abort(KeyError("why"))
    with pytest.raises(GroupAbortedError, match="why"):
        calling.result()
    until(lambda: not threads())


def test_a_call_that_was_ended_leaves_nothing_of_the_guard() -> None:
    watch, call = LoneWatch(0), Call()
    guard = BlockingCallWatchdog("guard-test", ErrorTranslator(watch), call.end)
    watch.abort(KeyError("why"))
    gc.disable()
    try:
        with pytest.raises(GroupAbortedError) as caught:
            guard.call(call, "receiving", [1], NEVER)
        guard.close()
        until(lambda: not threads())
        left = weakref.ref(guard)
        del caught, guard
        assert left() is None
    finally:
        gc.enable()
