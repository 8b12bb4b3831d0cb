"""What the operations of a pool's workers came to: exact, and kept when workers are replaced."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from server.driver.worker_processes import WorkerProcesses
from server.errors import PoolClosedError
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast.state.table import Slots
from tests.patience import PATIENCE_SECONDS, until
from tests.server.workers import Worker

if TYPE_CHECKING:
    from shm_broadcast.state.flight_recorder import VerbTotal

ALL_REDUCE = ("world", "all_reduce")


def counted(pool: WorkerPool | Replicas) -> list[tuple[int, int, int]]:
    """Of each rank's all-reduces: how many have ended, how many failed, and their bytes."""
    found = []
    for totals in pool.totals().values():
        told = [each for each in totals if (each.group, each.verb) == ALL_REDUCE]
        found.append((told[0].ended, told[0].failed, told[0].size) if told else (0, 0, 0))
    return found


def test_all_operations_count_also_those_of_workers_that_were_replaced() -> None:
    with WorkerPool(Worker, tp=2, restart="worker") as pool:
        for _ in range(5):
            pool.call("total", 1.0)
        size = counted(pool)[0][2]
        assert counted(pool) == [(5, 0, size)] * 2
        assert size > 0
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        until(lambda: pool.generation == 2 and pool.restarting is None)
        assert counted(pool) == [(5, 0, size)] * 2
        for _ in range(3):
            pool.call("total", 1.0)
        assert counted(pool) == [(8, 0, size * 8 // 5)] * 2
    with pytest.raises(PoolClosedError):
        pool.totals()


def test_what_failed_is_counted_as_failed() -> None:
    with WorkerPool(Worker, tp=2, restart="pool") as pool:
        call = pool.submit("hang_in_group", 1)
        until(lambda: pool.status()[0].operation.endswith("all_reduce"))
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert call.exception(60) is not None
        until(lambda: pool.generation == 2 and pool.restarting is None)
        assert [(ended, failed) for ended, failed, _ in counted(pool)] == [(1, 1), (0, 0)]


def test_replicas_are_counted_through() -> None:
    with Replicas(Worker, dp=2, tp=2) as replicas:
        for _ in range(4):
            replicas.call("total", 1.0)
        assert [ended for ended, *_ in counted(replicas)] == [2, 2, 2, 2]
        assert replicas.grid.coordinates(3) == {"dp": 1, "pp": 0, "pcp": 0, "tp": 1}


def test_a_signal_handler_may_end_a_pool_that_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when a new generation is about to take the place of the one that is counted."""
    read, assemble, assembled = Slots.totals, WorkerProcesses.assemble, threading.Event()

    def assemble_and_tell(*arguments: Any) -> None:
        assemble(*arguments)
        assembled.set()

    def interrupted(board: Slots, member: int) -> tuple[VerbTotal, ...]:
        monkeypatch.setattr(Slots, "totals", read)
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert assembled.wait(PATIENCE_SECONDS)
        signal.raise_signal(signal.SIGUSR1)
        return read(board, member)

    with WorkerPool(Worker, tp=2, restart="worker") as pool:
        before = signal.signal(signal.SIGUSR1, lambda *_: pool.shutdown())
        try:
            pool.call("total", 1.0)
            monkeypatch.setattr(WorkerProcesses, "assemble", assemble_and_tell)
            monkeypatch.setattr(Slots, "totals", interrupted)
            assert [ended for ended, *_ in counted(pool)] == [1, 1]
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert not any("ends without" in line for line in caplog.messages)
