"""The few events that are logged, with what is known of them beside the text."""

from __future__ import annotations

import logging
import os
import re
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from server.errors import WorkerLostError
from server.pool import WorkerPool
from shm_broadcast import Board, MessageQueue, PeerLostError
from tests.pages.blocks import block_of, without_numbers
from tests.patience import PATIENCE_SECONDS, until
from tests.server.workers import Restored, Worker

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, Any]]]:
    """The fields of the records whose text holds something."""
    for package in ("server", "shm_broadcast"):
        caplog.set_level(logging.INFO, package)

    def found(text: str) -> list[dict[str, Any]]:
        return [each.__dict__ for each in caplog.records if text in each.getMessage()]

    return found


def assert_documented(message: str) -> None:
    """It is said like this in docs/debugging.md; three dots stand for anything."""
    lines = block_of("docs/debugging.md", "the pool has started: 2 workers").splitlines()
    known = [re.escape(without_numbers(line)).replace(r"\.\.\.", ".*") for line in lines]
    assert any(re.fullmatch(each, without_numbers(message)) for each in known), message


def test_a_pool_starts_and_loses_a_worker(
    events: Callable[[str], list[dict[str, Any]]],
) -> None:
    with WorkerPool(Worker, tp=2) as pool:
        (started,) = events("the pool has started: 2 workers, generation 1")
        assert started["generation"] == 1
        pid = pool.status()[1].pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: events("was lost"))
        (lost,) = events(f"rank 1 (pid {pid}) of the pool was lost: ")
        assert (lost["rank"], lost["generation"]) == (1, 1)
        assert_documented(started["message"])
        assert_documented(lost["message"])


def test_a_pool_is_restarted(events: Callable[[str], list[dict[str, Any]]]) -> None:
    with WorkerPool(Restored, tp=2, restart="worker") as pool:
        call = pool.submit("sleep", 600.0)
        os.kill(pool.status()[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            call.result(PATIENCE_SECONDS)
        until(lambda: events("the pool was restarted"))
        (broken,) = events("the pool has broken, and is restarted: ")
        (restarted,) = events("the pool was restarted: generation 2")
        assert (broken["generation"], restarted["generation"]) == (1, 2)
        assert [each["generation"] for each in events("the pool has started")] == [1, 2]


def test_a_group_is_aborted_once(events: Callable[[str], list[dict[str, Any]]]) -> None:
    with Board.create(2, 0, "tp", (6, 7)) as board:
        board.abort(ValueError("no"), culprit=1)
        board.abort("later")
    (aborted,) = events("was aborted")
    assert "ValueError: no" in aborted["message"]
    assert (aborted["rank"], aborted["group"]) == (7, "tp")
    assert_documented(aborted["message"])


def test_a_reader_of_a_queue_is_lost(events: Callable[[str], list[dict[str, Any]]]) -> None:
    with (
        Board.create(2, 0, "tp", (6, 7)) as board,
        MessageQueue.on_board(board, 0, [1], 1 << 16) as queue,
    ):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                MessageQueue.attach(queue.export_handle(), Board.attach(board.handle(), 1))
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        os.waitpid(pid, 0)
        with pytest.raises(PeerLostError):
            queue.enqueue(bytes(1 << 20), PATIENCE_SECONDS)
    (lost,) = events("a reader of a queue was lost")
    assert (lost["rank"], lost["group"]) == (7, "tp")
    assert_documented(lost["message"])
