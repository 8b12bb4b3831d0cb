"""What the operations of a pool's workers came to: exact, and kept when workers are replaced."""

from __future__ import annotations

import os
import signal

import pytest

from server.errors import PoolClosedError
from server.pool import WorkerPool
from server.replicas import Replicas
from tests.patience import until
from tests.server.workers import Worker

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
        assert replicas.grid.coordinates(3) == {"dp": 1, "pp": 0, "tp": 1}
