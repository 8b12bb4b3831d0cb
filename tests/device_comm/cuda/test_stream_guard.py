"""The thread that watches a stream's operations."""

from __future__ import annotations

import threading

import pytest

from device_comm.cuda.watchdog import StreamWatchdog
from device_comm.torch_waiting import ErrorTranslator
from shm_broadcast import Board
from tests.refused_threads import refusing_threads


def test_a_guard_that_had_no_thread_gets_one_with_the_next_call() -> None:
    with Board.create(1, 0) as board:
        guard = StreamWatchdog(
            "guard-test", ErrorTranslator(board), (), lambda: None, lambda _: None
        )
        with refusing_threads("guard-test"), pytest.raises(RuntimeError, match="new thread"):
            guard.follow_replays()
        guard.follow_replays()
        assert "guard-test" in [thread.name for thread in threading.enumerate()]
        guard.close()
