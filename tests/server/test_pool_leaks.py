"""Pools one after another leave nothing behind in their driver."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchmarks.memory import shared_bytes
from server.calls.call_table import CallTable
from server.calls.dispatcher import Dispatcher
from server.config import PoolConfig
from server.driver.worker_processes import WorkerProcesses
from server.errors import CallTimeoutError, PoolClosedError, ProcessLimitError, WorkerLostError
from server.launchers.fork_servers import FORK_SERVERS
from server.launchers.local import end, launch
from server.pool import WorkerPool
from shm_broadcast import NEVER, CoordinatorError, GroupAbortedError
from shm_broadcast.state.stacks import STACK_SIGNAL
from tests.interruptions import Interruption, interrupt
from tests.patience import until
from tests.server.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True)
class Given:
    """An argument that can be told from its copies."""

    number: int


def settled() -> Counter[tuple[str, object]]:
    """What is there once it stays the same: a native thread of torch's store ends late."""
    before, now = None, things()
    while now != before:
        time.sleep(1)
        before, now = now, things()
    return now


def assert_nothing_left(before: Counter[tuple[str, object]]) -> None:
    """Nothing is there that was not there ``before``, once all that ends has ended."""
    end = time.monotonic() + 30
    while left := things() - before:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def things() -> Counter[tuple[str, object]]:
    """What a pool could leave, and how many of each."""
    gc.collect()
    found: dict[str, Iterable[object]] = {
        "descriptor": _descriptors(),
        "thread": (thread.name for thread in threading.enumerate()),
        "native thread": ("" for _ in Path("/proc/self/task").iterdir()),
        "process": (child.pid for child in psutil.Process().children(recursive=True)),
        "shared memory": Path("/dev/shm").iterdir(),
    }
    return Counter((kind, each) for kind, those in found.items() for each in those)


def _descriptors() -> Iterator[str]:
    """What the open descriptors are, but the one that this itself uses."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(fd.readlink())


def run_pools(count: int, tp: int = 1, fork: bool = True) -> None:
    for turn in range(count):
        with WorkerPool(Worker, tp=tp, config=PoolConfig(fork=fork)) as pool:
            assert pool.collective_rpc("total", args=(1.0,)) == [float(tp)] * tp
            assert pool.submit("echo", turn).result(timeout=60) == turn


@pytest.mark.parametrize(("fork", "count"), [(True, 10), (False, 1)])
def test_pools_one_after_another_in_two_threads_leave_nothing(fork: bool, count: int) -> None:
    run_pools(1, fork=fork)
    before = settled()
    with ThreadPoolExecutor(2) as threads:
        for sequence in [threads.submit(run_pools, count, fork=fork) for _ in range(2)]:
            sequence.result()
    assert_nothing_left(before)


def test_memory_of_a_pool_goes_with_it_and_not_by_a_garbage_collection() -> None:
    """Engines that must not pause switch the collector off."""
    run_pools(1)
    gc.collect()
    before = shared_bytes([os.getpid()])
    gc.disable()
    try:
        run_pools(2)
        assert shared_bytes([os.getpid()]) == before
    finally:
        gc.enable()


def end_in_order(pool: WorkerPool) -> None:
    assert pool.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]


def end_late(pool: WorkerPool) -> None:
    with pytest.raises(CallTimeoutError):
        pool.call("sleep", 60.0, timeout=0.1)


def end_with_a_lost_worker(pool: WorkerPool) -> None:
    os.kill(pool.status()[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        pool.call("echo")


def end_by_the_queues(pool: WorkerPool) -> None:
    """Nobody says why the group was aborted: that the queues have ended is all that is known."""
    with pytest.raises(GroupAbortedError):
        pool.call("abort_and_stay", 1)


def end_with_a_lost_thread(pool: WorkerPool) -> None:
    """What a thread of the pool has raised is the cause of the failure, and says where."""
    with pytest.raises(CoordinatorError, match="the thread pool-collector has failed"):
        pool.submit("make", "leaving").result(timeout=60)


@pytest.mark.parametrize(
    "end",
    [
        end_in_order,
        end_late,
        end_with_a_lost_worker,
        end_with_a_lost_thread,
        end_by_the_queues,
    ],
    ids=lambda end: end.__name__,
)
def test_a_pool_that_was_shut_down_keeps_no_memory_and_answers_as_before(
    end: Callable[[WorkerPool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.calls.call_table.REPORT_SECONDS", 0.01)
    monkeypatch.setattr(WorkerProcesses, "may_report", lambda *_: False)
    run_pools(1, tp=2)
    gc.collect()
    before = shared_bytes([os.getpid()]), Counter(_descriptors())
    gc.disable()
    try:
        pool = WorkerPool(Worker, tp=2, config=PoolConfig(settle_seconds=0.1))
        answered = pool.submit("echo", "answered")
        assert answered.result(timeout=60) == "answered"
        end(pool)
        failure = pool.failure
        unanswered = None if failure else pool.submit("sleep", 60.0)
        pool.shutdown(0.5)
        assert (shared_bytes([os.getpid()]), Counter(_descriptors())) == before
        assert str(pool.failure) == str(failure or "the pool was shut down")
        assert answered.result() == "answered"
        if unanswered is not None:
            assert str(unanswered.exception()) == "the pool was shut down"
        for ask in (pool.status, pool.totals):
            with pytest.raises(PoolClosedError, match=f"^{ask.__name__}: the pool was shut down$"):
                ask()
        for refused in (pool.call, pool.submit):
            with pytest.raises(CoordinatorError, match=re.escape(str(pool.failure))):
                refused("echo")
        pool.shutdown()
    finally:
        gc.enable()


def test_the_memory_of_a_pool_goes_with_the_last_call_that_its_end_has_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that is in a call may still look at it."""
    run_pools(1)
    gc.collect()
    before = shared_bytes([os.getpid()])
    ended, looks = threading.Event(), threading.Event()
    listen = Dispatcher._listen

    def look(dispatcher: Dispatcher, *args: Any) -> None:
        looks.set()
        assert ended.wait(60)
        listen(dispatcher, *args)

    pool = WorkerPool(Worker)
    monkeypatch.setattr(Dispatcher, "_listen", look)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(pool.call, "sleep", 60.0)
        assert looks.wait(60)
        pool.shutdown(0.1)
        assert shared_bytes([os.getpid()]) > before
        ended.set()
        assert isinstance(calling.exception(60), PoolClosedError)
    assert shared_bytes([os.getpid()]) == before


def test_a_pool_whose_shutdown_is_interrupted_at_its_end_is_freed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(Worker)
    with monkeypatch.context() as changed:
        changed.setattr(CallTable, "release", interrupt)
        with pytest.raises(Interruption):
            pool.shutdown()
    pool.shutdown()
    driver = weakref.ref(pool._driver)
    gc.disable()
    try:
        del pool
        assert driver() is None
    finally:
        gc.enable()


def test_what_a_call_was_given_and_gave_goes_with_its_future() -> None:
    with WorkerPool(Worker) as pool:
        pool.submit("echo", 0).result(timeout=60)
        gc.collect()
        gc.disable()
        try:
            given = {Given(turn) for turn in range(3)}
            gone = [weakref.ref(each) for each in given]
            for each in given:
                assert pool.submit("echo", each).result(timeout=60) == each
            cancelled = pool.submit("echo", given.pop())
            cancelled.cancel()
            wait([cancelled], timeout=60)
            del each, given, cancelled
            assert pool.call("echo", 1) == 1
            # A thread of the pool may be about to let one go.
            until(lambda: [each() for each in gone] == [None] * 3)
        finally:
            gc.enable()


@pytest.mark.parametrize("fork", [True, False])
def test_a_launch_that_fails_midway_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, fork: bool
) -> None:
    """The third worker's process cannot be started: the two before it end."""
    run_pools(1, tp=4, fork=fork)
    before = settled()
    started = 0
    starter, begin = (FORK_SERVERS, FORK_SERVERS.fork) if fork else (subprocess, subprocess.Popen)

    def refuse_the_third(*arguments: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        if started == 3:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return begin(*arguments, **options)

    monkeypatch.setattr(starter, begin.__name__, refuse_the_third)
    with pytest.raises(ProcessLimitError, match="no further process"):
        WorkerPool(Worker, tp=4, config=PoolConfig(fork=fork))
    assert started == 3
    assert_nothing_left(before)


def test_a_worker_closed_by_many_threads_closes_each_descriptor_once() -> None:
    """A descriptor closed twice may be somebody else's by then."""
    for _ in range(20):
        (worker,) = launch([0], 1, NEVER)
        end([worker], 0.0, 0.0)
        gate = threading.Barrier(8)

        def close(worker: Any = worker, gate: Any = gate) -> None:
            gate.wait()
            worker.close()
            worker.signal(STACK_SIGNAL)
            os.close(os.memfd_create("takes the number of one that was closed"))

        with ThreadPoolExecutor(8) as threads:
            for closing in [threads.submit(close) for _ in range(8)]:
                closing.result()
