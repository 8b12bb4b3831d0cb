"""However a pool or its driver ends, nothing is left of it, and nothing needless is printed."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
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

from benchmarks.http_served import runs
from benchmarks.memory import shared_bytes
from server.calls.dispatcher import Dispatcher
from server.config import PoolConfig
from server.driver.worker_processes import WorkerProcesses
from server.errors import CallTimeoutError, PoolClosedError, ProcessLimitError, WorkerLostError
from server.launchers.fork_servers import FORK_SERVERS
from server.launchers.local import end, launch
from server.pool import WorkerPool
from shm_broadcast import NEVER, CoordinatorError, GroupAbortedError
from shm_broadcast.state.stacks import STACK_SIGNAL
from tests.commands import LIMIT_SECONDS
from tests.patience import STALL_SECONDS, until
from tests.programs import Program
from tests.server.drivers import main as drive
from tests.server.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

DRIVERS = Path(__file__).with_name("drivers.py")


class Driver:
    """A running driver, in a session of its own as from a terminal.

    Args:
        arguments: of `drivers`.
        command: how Python is started for it; without one it is forked.
    """

    def __init__(self, *arguments: str, command: Sequence[str] = ()) -> None:
        python = [sys.executable, "-W", "error", *command, *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process: Program | subprocess.Popen[str] = (
            subprocess.Popen(python, **pipes, text=True, start_new_session=True)
            if command
            else Program(drive, *arguments)
        )
        self.pids: list[int] = []

    def says(self) -> list[int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        numbers: list[int] = json.loads(line)
        return numbers

    def works(self) -> None:
        """Return once its workers are in what the test is about, or start."""
        self.pids = self.says()
        if self.pids:
            assert len(self.pids) in (3, 6)
            time.sleep(0.3)
            return
        assert self.says() in ([0], [1])  # a rank that starts
        self.pids = [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]
        assert len(self.pids) >= 2

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode or 0, errors

    def left(self, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        while left := [pid for pid in self.pids if runs(pid)]:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return left


@pytest.fixture
def run() -> Iterator[Callable[..., Driver]]:
    running: list[Driver] = []

    def start(*arguments: str, command: Sequence[str] = ()) -> Driver:
        running.append(Driver(*arguments, command=command))
        return running[-1]

    yield start
    for driver in running:
        with suppress(ProcessLookupError):
            os.killpg(driver.process.pid, signal.SIGKILL)
        driver.process.communicate()


@pytest.mark.parametrize(
    "given",
    [
        ("wait", "group", "fork"),
        ("wait", "locked", "fork"),
        ("wait", "idle", "spawn"),
        ("start",),
    ],
)
def test_a_killed_driver_takes_workers_along(
    run: Callable[..., Driver], given: tuple[str, ...]
) -> None:
    """In a collective, C code that holds Python's lock, no call, and a start."""
    driver = run(*given)
    driver.works()
    driver.process.kill()
    assert driver.left(5.0 + STALL_SECONDS) == []
    assert driver.end() == (-signal.SIGKILL, "")


@pytest.mark.parametrize("given", [("wait", "group"), ("start",)])
def test_an_interrupt_ends_all_silently(run: Callable[..., Driver], given: tuple[str, ...]) -> None:
    driver = run(*given)
    driver.works()
    os.killpg(driver.process.pid, signal.SIGINT)
    assert driver.end() == (130, "")
    assert driver.left(1.0 + STALL_SECONDS) == []


@pytest.mark.parametrize("how", ["", "raise"])
def test_a_forgotten_pool_ends_with_python(run: Callable[..., Driver], how: str) -> None:
    driver = run("forget", how)
    driver.pids = driver.says()
    status, errors = driver.end()
    assert (status, errors.splitlines()[-1:]) == (
        (1, ["ValueError: the driver's own"]) if how else (0, [])
    )
    assert driver.left(1.0 + STALL_SECONDS) == []


def test_a_pool_without_references_ends(run: Callable[..., Driver]) -> None:
    driver = run("drop")
    driver.pids = driver.says()
    assert driver.left(10.0 + STALL_SECONDS) == []


def test_a_forked_child_leaves_the_pool_alone(run: Callable[..., Driver]) -> None:
    behaviours = ("exit", "shutdown", "block", "drop", "use", "own", "outlive")
    driver = run("fork", ",".join(behaviours))
    driver.pids = driver.says()
    for how in behaviours:
        (child,) = driver.says()
        assert runs(child) == (how == "outlive"), how
    driver.process.kill()
    assert driver.left(5.0 + STALL_SECONDS) == []
    assert runs(child)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_says_what_it_waits_for_at_its_end(run: Callable[..., Driver], kind: str) -> None:
    told = f"this worker has no more calls, but waits for its {kind}: ['writes a snapshot']"
    assert run("outlasting", kind).end() == (0, f"[rank 0] {told}\n")


def test_a_pool_raises_no_warning_and_its_workers_have_the_drivers_options(
    run: Callable[..., Driver],
) -> None:
    driver = run("live", command=["-OO", "-X", "dev", "-W", "error::FutureWarning", str(DRIVERS)])
    assert [driver.says() for _ in range(2)] == [[2, True, True]] * 2  # forked, spawned
    assert driver.end() == (0, "")


def test_a_class_of_a_module_that_python_runs_by_its_name_works(run: Callable[..., Driver]) -> None:
    driver = run(command=["-m", "tests.server.drivers", "main"])
    driver.pids = driver.says()
    assert driver.pids.pop() == len("Here")
    assert driver.end() == (0, "")
    assert driver.left(1.0 + STALL_SECONDS) == []


NESTED = """
import sys
sys.path.insert(0, {root!r})
from server.pool import WorkerPool

class Inner:
    def __init__(self, context): pass
    def answer(self): return 7

class Outer(Inner):
    def answer(self):
        with WorkerPool(Inner) as pool:
            return pool.call("answer")
    def count(self):
        yield from range(3)

if __name__ == "__main__":
    with WorkerPool(Outer) as pool:
        print([pool.call("answer")], flush=True)
        unfinished = pool.stream("count")
        print([next(unfinished)], flush=True)
    raise SystemExit("with a stream that has not ended")
"""


def test_a_script_whose_path_is_no_text_may_make_pools(
    run: Callable[..., Driver], tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    script = folder / os.fsdecode(b"n\xe9sted.py")
    script.write_text(NESTED.format(root=str(DRIVERS.parents[2])))
    driver = run(command=[str(script)])
    assert [*driver.says(), *driver.says()] == [7, 0]
    assert driver.end() == (1, "with a stream that has not ended\n")


@pytest.mark.parametrize(
    ("arguments", "is_main"),
    [
        ("Mine", True),
        ("Mine, tp=2", False),
        ("Mine, tp=2, config=PoolConfig(preload=['service'])", False),
        ("'workers:Other', worker_kwargs={'size': Size()}", False),
    ],
    ids=["main", "found", "preloaded", "argument"],
)
def test_a_pool_made_by_an_import_is_refused(
    arguments: str, is_main: bool, run: Callable[..., Driver], tmp_path: Path
) -> None:
    """Not a worker whose workers have workers, without end; nor such a fork server."""
    path = f"import sys; sys.path[:0] = {[str(DRIVERS.parents[2]), str(tmp_path)]!r}\n"
    (tmp_path / "service.py").write_text(
        f"{path}from server.pool import WorkerPool\n"
        "from server.config import PoolConfig\n"
        "class Size: pass\n"
        "class Mine:\n"
        "    def __init__(self, context): pass\n"
        f"POOL = WorkerPool({arguments})\n"
    )
    (tmp_path / "workers.py").write_text(
        "class Other:\n    def __init__(self, context, size): pass\n"
    )
    command = [str(tmp_path / "service.py")] if is_main else []
    status, errors = run("import", str(tmp_path), command=command).end()
    assert status == 1
    assert "put the code that makes the pool into a function, or behind if __name__ ==" in errors


# Pools one after another in one process.


@dataclass(frozen=True)
class Given:
    number: int


def settled() -> Counter[tuple[str, object]]:
    """What is there once it stays the same: a native thread of torch's store ends late."""
    before, now = None, things()
    while now != before:
        time.sleep(0.5)
        before, now = now, things()
    return now


def assert_nothing_left(before: Counter[tuple[str, object]]) -> None:
    end = time.monotonic() + 30
    while left := things() - before:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def things() -> Counter[tuple[str, object]]:
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
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(fd.readlink())


def run_pools(count: int, tp: int = 1, fork: bool = True) -> None:
    for turn in range(count):
        with WorkerPool(Worker, tp=tp, config=PoolConfig(fork=fork)) as pool:
            assert pool.collective_rpc("total", args=(1.0,)) == [float(tp)] * tp
            assert pool.submit("echo", turn).result(timeout=60) == turn


def test_pools_one_after_another_in_two_threads_leave_nothing() -> None:
    run_pools(1)
    before = settled()
    with ThreadPoolExecutor(2) as threads:
        for sequence in [threads.submit(run_pools, 3) for _ in range(2)]:
            sequence.result()
    assert_nothing_left(before)


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
    """No rank says why the group was aborted: only the end of the queues is known."""
    with pytest.raises(GroupAbortedError):
        pool.call("abort_and_stay", 1)


def end_with_a_lost_thread(pool: WorkerPool) -> None:
    told = r"the thread pool-collector has failed: SystemExit\('left when unpickled'\)"
    with pytest.raises(CoordinatorError, match=told) as raised:
        pool.submit("make", "leaving").result(timeout=60)
    assert isinstance(raised.value.__cause__, SystemExit)


@pytest.mark.parametrize(
    "end",
    [end_in_order, end_late, end_with_a_lost_worker, end_with_a_lost_thread, end_by_the_queues],
    ids=lambda end: end.__name__,
)
def test_a_pool_that_was_shut_down_keeps_no_memory_and_answers_as_before(
    end: Callable[[WorkerPool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a garbage collection: engines that must not pause switch the collector off."""
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


def test_memory_goes_with_the_last_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert wait([cancelled], timeout=60).done
            del each, given, cancelled
            assert pool.call("echo", 1) == 1
            # A thread of the pool may be about to let one go.
            until(lambda: [each() for each in gone] == [None] * 3)
        finally:
            gc.enable()


@pytest.mark.parametrize("fork", [True, False])
def test_pools_and_a_failed_launch_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, fork: bool
) -> None:
    run_pools(1, tp=2)
    before = settled()
    run_pools(1, fork=fork)
    started = 0
    starter, begin = (FORK_SERVERS, FORK_SERVERS.fork) if fork else (subprocess, subprocess.Popen)

    def refuse_the_second(*arguments: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        if started == 2:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return begin(*arguments, **options)

    monkeypatch.setattr(starter, begin.__name__, refuse_the_second)
    with pytest.raises(ProcessLimitError, match="no further process"):
        WorkerPool(Worker, tp=3, config=PoolConfig(fork=fork))
    assert started == 2
    assert_nothing_left(before)


def test_a_worker_closed_by_many_threads_closes_each_descriptor_once() -> None:
    for _ in range(10):
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
