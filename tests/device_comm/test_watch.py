from __future__ import annotations

import threading
import time

import pytest

from device_comm import LoneWatch
from shm_broadcast import Deadline, GroupAbortedError, GroupTimeoutError
from tests.device_comm.meeting import SOON


def nobody() -> tuple[int, ...]:
    return ()


def test_waiting_ends_when_ready() -> None:
    watch = LoneWatch(1)
    looks = iter([False, False, True])
    watch.wait(lambda: next(looks), Deadline.after(5), "waiting", nobody)


def test_waiting_ends_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(GroupTimeoutError, match=r"waiting: timed out after 0\.1 s"):
        LoneWatch(0).wait(bool, Deadline.after(0.1), "waiting", nobody)
    assert 0.09 < time.monotonic() - began < SOON


def test_a_ring_wakes() -> None:
    watch, done = LoneWatch(0), threading.Event()

    def ring() -> None:
        time.sleep(0.05)
        done.set()
        watch.notify(0)

    began = time.monotonic()
    threading.Thread(target=ring).start()
    watch.wait(done.is_set, Deadline.after(3 * SOON), "waiting", nobody, poll=3 * SOON)
    assert time.monotonic() - began < SOON


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_say_what_it_is_aborts_all_the_same() -> None:
    watch = LoneWatch(0)
    watch.abort(SilentError())
    with pytest.raises(GroupAbortedError, match="SilentError"):
        watch.check("next")


def test_an_abort_ends_waiting_and_the_first_one_counts() -> None:
    watch = LoneWatch(2)
    watch.check("before")
    assert watch.aborted is None
    threading.Timer(0.05, watch.abort, (KeyError("why"), 3)).start()
    with pytest.raises(GroupAbortedError) as caught:
        watch.wait(bool, Deadline.after(3 * SOON), "waiting", nobody)
    watch.abort("later")
    failure = caught.value.failure
    assert watch.aborted == failure
    assert (failure.rank, failure.kind, failure.message, failure.culprit) == (
        2,
        "KeyError",
        "'why'",
        3,
    )
    with pytest.raises(GroupAbortedError):
        watch.check("after")


def test_stamps_cost_nothing_and_say_nothing() -> None:
    watch = LoneWatch(4)
    assert watch.record_begin("operation") == 0
    watch.idle()
    assert watch.member == 4
