"""A process of a pool that changes its user: what is shared goes on, and what cannot be says so."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerError
from server.pool import WorkerPool
from shm_broadcast import ForeignMemoryError
from tests.intruder import become_nobody
from tests.patience import PATIENCE_SECONDS, until
from tests.programs import Program
from tests.server.drivers import say
from tests.server.workers import Worker

if TYPE_CHECKING:
    from server.worker import WorkerContext

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


class Nobody(Worker):
    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        super().__init__(context, **kwargs)
        become_nobody()

    def pass_on(self) -> float:
        """The first message from rank 0 to rank 1, for which they open memory of each other."""
        if self.rank == 0:
            self.groups.world.send(torch.ones(1), 1)
            return 1.0
        return float(self.groups.world.recv((1,), torch.float32, 0).item())


def test_workers_that_become_another_user_go_on_with_what_they_share() -> None:
    with WorkerPool(Nobody, tp=2, restart="worker") as pool:
        assert pool.call("total", 1.0) == 2.0
        assert pool.call("ones", 1 << 20).tolist() == [0.0] * (1 << 20)
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert pool.call("total", 1.0, retry=True, timeout=PATIENCE_SECONDS) == 2.0


def test_a_message_for_which_one_has_to_open_the_other_s_memory_says_why_it_fails() -> None:
    with WorkerPool(Nobody, tp=2) as pool, pytest.raises(WorkerError) as caught:
        pool.call("pass_on")
    assert caught.value.kind == "shm_broadcast.errors.SharedMemoryError"
    assert "a member that changes its user (setuid)" in caught.value.message


def test_a_result_that_the_driver_cannot_open_says_why_it_fails() -> None:
    config = PoolConfig(zero_copy=True)
    with (
        WorkerPool(Nobody, config=config) as pool,
        pytest.raises(ForeignMemoryError, match=r"a member that changes its user \(setuid\)"),
    ):
        pool.call("ones", 1 << 20)


def drive() -> None:
    """A driver that becomes another user, and ends with workers that do not end by themselves."""
    config = PoolConfig(stack_seconds=0.1, kill_seconds=0.1)
    with WorkerPool(Worker, tp=2, config=config) as pool:
        say([status.pid for status in pool.status()])
        become_nobody()
        assert pool.call("total", 1.0) == 2.0
        with suppress(CallTimeoutError):
            pool.call("hold_python", [0, 1], timeout=0.1)
        pool.shutdown(0.1)


def test_a_driver_that_becomes_another_user_ends_its_workers() -> None:
    program = Program(drive)
    pids: list[int] = json.loads(program.stdout.readline())
    _, errors = program.communicate()
    assert (program.returncode, errors) == (0, "")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # noqa: PTH110
