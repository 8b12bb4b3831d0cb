"""However the driver ends, nothing is left of its pool, and nothing is said that need not be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks.http_served import runs
from tests.commands import LIMIT_SECONDS
from tests.patience import STALL_SECONDS, until
from tests.programs import Program
from tests.server.drivers import main as drive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DRIVERS = Path(__file__).with_name("drivers.py")


class Driver:
    """A running driver, in a session of its own as from a terminal.

    Args:
        arguments: of `drivers`.
        command: how Python is started for it; as a rule it is not, but forked.
    """

    def __init__(self, *arguments: str, command: Sequence[str] = ()) -> None:
        self.process: Program | subprocess.Popen[str]
        if command:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", *command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        else:
            self.process = Program(drive, *arguments)
        self.pids: list[int] = []

    def says(self) -> list[int]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        numbers: list[int] = json.loads(line)
        return numbers

    def family(self) -> list[int]:
        """Everyone below the driver."""
        self.pids += [
            child.pid for child in psutil.Process(self.process.pid).children(recursive=True)
        ]
        return self.pids

    def end(self) -> tuple[int, str]:
        """Its exit status, and all it and its workers said on stderr."""
        _, errors = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode or 0, errors

    def left(self, seconds: float) -> list[int]:
        """Who of the family is still there so long after."""
        end = time.monotonic() + seconds
        while left := [pid for pid in self.pids if runs(pid)]:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return left


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    running: list[Driver] = []
    yield running
    for driver in running:
        with suppress(ProcessLookupError):
            os.killpg(driver.process.pid, signal.SIGKILL)
        driver.process.communicate()


@pytest.mark.parametrize(
    ("what", "start"),
    [("idle", "fork"), ("sleep", "fork"), ("group", "fork"), ("locked", "fork"), ("idle", "spawn")],
)
def test_a_killed_driver_takes_all_workers_along(
    drivers: list[Driver], what: str, start: str
) -> None:
    """Whatever they are in: no call, a sleep, a collective, C code that holds Python's lock."""
    driver = Driver("wait", what, start)
    drivers.append(driver)
    driver.pids = driver.says()
    assert len(driver.pids) == 6
    time.sleep(0.3)
    driver.process.kill()
    assert driver.left(5.0 + STALL_SECONDS) == []
    assert driver.end() == (-signal.SIGKILL, "")


def test_a_driver_killed_while_workers_start_takes_them_along(drivers: list[Driver]) -> None:
    driver = Driver("start")
    drivers.append(driver)
    driver.says()
    until(lambda: len(driver.family()) >= 2)
    driver.process.kill()
    assert driver.left(5.0 + STALL_SECONDS) == []
    assert driver.end() == (-signal.SIGKILL, "")


@pytest.mark.parametrize("what", ["idle", "group"])
def test_an_interrupt_from_the_terminal_ends_all_silently(drivers: list[Driver], what: str) -> None:
    driver = Driver("wait", what)
    drivers.append(driver)
    driver.pids = driver.says()
    time.sleep(0.3)
    os.killpg(driver.process.pid, signal.SIGINT)
    assert driver.end() == (130, "")
    assert driver.left(1.0 + STALL_SECONDS) == []


def test_an_interrupt_while_workers_start_ends_all_silently(drivers: list[Driver]) -> None:
    driver = Driver("start")
    drivers.append(driver)
    assert driver.says() == []
    assert driver.says() in ([0], [1])
    assert len(driver.family()) >= 2
    os.killpg(driver.process.pid, signal.SIGINT)
    assert driver.end() == (130, "")
    assert driver.left(1.0 + STALL_SECONDS) == []


@pytest.mark.parametrize("how", ["", "raise"])
def test_a_pool_that_was_forgotten_ends_with_the_interpreter(
    drivers: list[Driver], how: str
) -> None:
    driver = Driver("forget", how)
    drivers.append(driver)
    driver.pids = driver.says()
    status, errors = driver.end()
    assert (status, errors.splitlines()[-1:]) == (
        (1, ["ValueError: the driver's own"]) if how else (0, [])
    )
    assert driver.left(1.0 + STALL_SECONDS) == []


def test_a_pool_that_nobody_refers_to_ends(drivers: list[Driver]) -> None:
    driver = Driver("drop")
    drivers.append(driver)
    driver.pids = driver.says()
    assert driver.left(10.0 + STALL_SECONDS) == []


def test_a_forked_child_leaves_the_pool_alone(drivers: list[Driver]) -> None:
    """Whatever it does with it: the pool goes on in its own process."""
    behaviours = ("exit", "shutdown", "block", "drop", "use", "own")
    driver = Driver("fork", ",".join(behaviours))
    drivers.append(driver)
    driver.pids = driver.says()
    for how in behaviours:
        (child,) = driver.says()
        assert not runs(child), how


def test_a_forked_child_that_outlives_the_driver_keeps_no_worker(drivers: list[Driver]) -> None:
    driver = Driver("fork", "outlive")
    drivers.append(driver)
    driver.pids = driver.says()
    (child,) = driver.says()
    driver.process.kill()
    assert driver.left(5.0 + STALL_SECONDS) == []
    assert runs(child)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_that_what_it_has_started_keeps_says_so(drivers: list[Driver], kind: str) -> None:
    driver = Driver("outlasting", kind)
    drivers.append(driver)
    status, errors = driver.end()
    assert status == 0
    told = f"this worker has no more calls, but waits for its {kind}: ['writes a snapshot']"
    assert errors == f"[rank 0] {told}\n"


@pytest.mark.parametrize(("tp", "start"), [("2", "fork"), ("1", "spawn")])
def test_a_pool_says_nothing_where_everything_is_warned_of(
    drivers: list[Driver], tp: str, start: str
) -> None:
    """What was not closed, for one; in the driver as in its workers, which have its options."""
    driver = Driver("live", tp, start, command=["-X", "dev", str(DRIVERS)])
    drivers.append(driver)
    assert driver.end() == (0, "")


@pytest.mark.parametrize("command", [[str(DRIVERS)], ["-m", "tests.server.drivers"]])
def test_a_worker_of_the_main_module_works(drivers: list[Driver], command: list[str]) -> None:
    driver = Driver("main", command=command)
    drivers.append(driver)
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


def test_a_script_in_a_folder_whose_name_is_no_text_ends_though_a_stream_has_not(
    drivers: list[Driver], tmp_path: Path
) -> None:
    """Its worker is the driver of a pool of another class of the script."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    script = folder / os.fsdecode(b"n\xe9sted.py")
    script.write_text(NESTED.format(root=str(DRIVERS.parents[2])))
    driver = Driver(command=[str(script)])
    drivers.append(driver)
    assert [*driver.says(), *driver.says()] == [7, 0]
    assert driver.end() == (1, "with a stream that has not ended\n")


def test_a_main_module_without_a_guard_is_told_so(drivers: list[Driver], tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(DRIVERS.parents[2])!r})\n"
        "from server.pool import WorkerPool\n"
        "class Mine:\n"
        "    def __init__(self, context): pass\n"
        "WorkerPool(Mine)\n"
    )
    driver = Driver(command=[str(script)])
    drivers.append(driver)
    status, errors = driver.end()
    assert status == 1
    assert "put the code that makes the pool into a function, or behind if __name__ ==" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        "Mine, tp=2",
        "Mine, tp=2, config=PoolConfig(preload=['service'])",
        "'workers:Other', worker_kwargs={'size': Size()}",
    ],
    ids=["found", "preloaded", "argument"],
)
def test_a_module_that_makes_a_pool_when_workers_import_it_is_told_so(
    arguments: str, drivers: list[Driver], tmp_path: Path
) -> None:
    """Not a worker whose workers have workers, without end; nor such a fork server."""
    (tmp_path / "service.py").write_text(
        "from server.pool import WorkerPool\n"
        "from server.config import PoolConfig\n"
        "class Size: pass\n"
        "class Mine:\n"
        "    def __init__(self, context): pass\n"
        f"POOL = WorkerPool({arguments})\n"
    )
    (tmp_path / "workers.py").write_text(
        "class Other:\n    def __init__(self, context, size): pass\n"
    )
    path = [str(DRIVERS.parents[2]), str(tmp_path)]
    driver = Driver(command=["-c", f"import sys; sys.path[:0] = {path!r}; import service"])
    drivers.append(driver)
    status, errors = driver.end()
    assert status == 1
    assert "put the code that makes the pool into a function, or behind if __name__ ==" in errors


def test_a_driver_that_has_no_file_works(drivers: list[Driver]) -> None:
    """As from a console; the folder it stands in has a server.py of its own."""
    code = (
        f"import sys; sys.path.insert(0, {str(DRIVERS.parents[2])!r})\n"
        "from server.pool import WorkerPool\n"
        "with WorkerPool('tests.server.workers:Worker') as pool: print([pool.call('where')[1]])\n"
    )
    driver = Driver(command=["-c", code])
    drivers.append(driver)
    driver.pids = driver.says()
    assert driver.end() == (0, "")
    assert driver.left(1.0 + STALL_SECONDS) == []
