"""What limits a process of a pool: its cores, its open files, its user."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.http_served import COMMAND
from server.config import PoolConfig
from server.driver.binding import usable_cores
from server.driver.limits import open_files
from server.errors import CallTimeoutError, DescriptorLimitError, RestartLimitError, WorkerError
from server.hosts.host_supervisor import serve_host
from server.hosts.place import Hosts
from server.launchers.fork_servers import FORK_SERVERS, worker_environment
from server.pool import WorkerPool
from shm_broadcast import ForeignMemoryError
from tests.commands import run_code, run_to_end
from tests.intruder import become_nobody
from tests.patience import PATIENCE_SECONDS, until
from tests.programs import Program
from tests.ranks import run_ranks
from tests.server.drivers import say
from tests.server.over_hosts import PATIENT, PORT, SECRET
from tests.server.workers import Worker, pids_of
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from server.worker import WorkerContext


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")

# --- cores --------------------------------------------------------------------------------------


def test_workers_have_as_many_threads_as_the_environment_says_or_there_are_cores() -> None:
    code = """
import os
from server import WorkerPool
os.environ["OMP_NUM_THREADS"] = "1"
for _ in range(2):
    with WorkerPool("tests.server.workers:Worker") as pool:
        print(pool.call("environment")["threads"])
    os.environ.pop("OMP_NUM_THREADS", None)
"""
    assert run_code(code).stdout == f"1\n{usable_cores()}\n"


def run_limited(code: str, controller: str, limit: str, value: int) -> CompletedProcess[str]:
    """A Python in a real control group with a limit, where this user may make one."""
    group = Path("/sys/fs/cgroup", controller, f"limited-{os.getpid()}")
    move = 'echo $$ > "$2/cgroup.procs"; exec "$0" -c "$1"'
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group of version 1: {error}")
    try:
        (group / limit).write_text(str(value))
        return run_to_end("sh", "-c", move, sys.executable, code, str(group), status=None)
    finally:
        until(partial(_is_removed, group))


def _is_removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_a_process_in_a_group_with_a_quota_keeps_to_it() -> None:
    code = "from server.driver.binding import *; print(cpu_quota(), usable_cores())"
    done = run_limited(code, "cpu", "cpu.cfs_quota_us", 170_000)
    assert done.stdout == "1.7 1\n", done.stderr


def test_a_workers_threads_soon_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with WorkerPool(Worker) as pool:
        assert pool.call("environment")["waiting"] == ("PASSIVE", "10000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    given = worker_environment(1)
    assert (given["OMP_WAIT_POLICY"], "GOMP_SPINCOUNT" in given) == ("ACTIVE", False)


# --- open files (``ulimit -n``) -----------------------------------------------------------------


def at_most(files: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def a_pool_names_how_many_it_needs(_: int, __: int) -> None:
    """Within a few more files than are open; it works with as many as the error names."""
    began = open_files()
    for limit in (began + 1, began + 9, began + 29):
        at_most(limit)
        for _ in range(2):
            try:
                WorkerPool(Worker, tp=2).shutdown()
            except DescriptorLimitError as error:  # its traceback, which holds files, is let go
                given, needed, told = error.limit, error.needed, str(error)
        assert given == limit < needed
        assert f"{limit} files open (RLIMIT_NOFILE, ulimit -n), and needs about {needed}" in told
    # A file for stacks, and what fork servers take: of two limits, one each.
    assert open_files() <= began + 1 + 2 * 2
    at_most(needed)
    FORK_SERVERS.close()  # servers keep the limits of their start
    with WorkerPool(Worker, tp=2) as pool:
        assert pool.call("total", 1.0) == 2.0


def a_pool_cannot_be_restarted(_: int, __: int) -> None:
    warm_fork_servers()
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=1) as pool:
        pids = pids_of(pool)
        at_most(open_files() + 2)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: pool.failure is not None)
        assert isinstance(pool.failure, RestartLimitError)
        assert "RLIMIT_NOFILE" in pool.failure.failure


def hosts_cannot_take_part(rank: int, _: int) -> None:
    """Where libzmq may open too few files, it ends the process."""
    here = Hosts(2, rank, "127.0.0.1", PORT, SECRET)
    begin: Callable[[], object] = partial(serve_host, here, PATIENCE_SECONDS)
    if here.is_head:
        begin = partial(WorkerPool, Worker, tp=2, launcher="hosts", hosts=here)
    at_most(open_files() + 20)
    with pytest.raises(DescriptorLimitError, match="RLIMIT_NOFILE"):
        begin()


def a_restart_over_hosts_counts_files_of_new_workers_only(rank: int, _: int) -> None:
    warm_fork_servers()
    here = Hosts(2, rank, "127.0.0.1", PORT, SECRET, silence_seconds=PATIENT)
    if not here.is_head:
        serve_host(here, PATIENCE_SECONDS)
        return
    at_most(open_files() + 224)  # the start takes 124, the restart 195
    config = PoolConfig(leave_seconds=PATIENCE_SECONDS)
    options: dict[str, Any] = {"launcher": "hosts", "hosts": here, "restart": "worker"}
    with WorkerPool(Worker, tp=6, config=config, **options) as pool:
        before = pids_of(pool)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: pool.generation > 1)
        after = pids_of(pool)
        assert pool.generation == 2
        assert before[0] != after[0] and before[1:] == after[1:]


@pytest.mark.parametrize(
    ("n", "body"),
    [
        *((1, a_pool_names_how_many_it_needs), (1, a_pool_cannot_be_restarted)),
        *((2, hosts_cannot_take_part), (2, a_restart_over_hosts_counts_files_of_new_workers_only)),
    ],
)
def test_of_too_few_open_files(n: int, body: Callable[[int, int], None]) -> None:
    run_ranks(n, body)


def test_a_service_with_too_few_files_ends_with_a_line() -> None:
    command = ["prlimit", "--nofile=24:24", sys.executable, "-c", COMMAND, "serve"]
    done = run_to_end(*command, "--port", "0", status=1, timeout=PATIENCE_SECONDS)
    assert "DescriptorLimitError: this process may have 24 files open" in done.stderr
    assert done.stderr.count("\n") == 1


# --- another user -------------------------------------------------------------------------------


class Nobody(Worker):
    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        super().__init__(context, **kwargs)
        become_nobody()

    def pass_on(self) -> float:
        if self.rank == 0:
            self.groups.world.send(torch.ones(1), 1)
            return 1.0
        return float(self.groups.world.recv((1,), torch.float32, 0).item())


@needs_root
def test_workers_that_become_another_user_go_on_with_what_they_share() -> None:
    with WorkerPool(Nobody, tp=2, restart="worker") as pool:
        assert pool.call("total", 1.0) == 2.0
        assert pool.call("ones", 1 << 20).tolist() == [0.0] * (1 << 20)
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert pool.call("total", 1.0, retry=True, timeout=PATIENCE_SECONDS) == 2.0


@needs_root
def test_a_message_that_needs_the_memory_of_another_user_says_why_it_fails() -> None:
    with WorkerPool(Nobody, tp=2) as pool, pytest.raises(WorkerError) as caught:
        pool.call("pass_on")
    assert caught.value.kind == "shm_broadcast.errors.SharedMemoryError"
    assert "a member that changes its user (setuid)" in caught.value.message


@needs_root
def test_a_result_that_the_driver_cannot_open_says_why_it_fails() -> None:
    config = PoolConfig(zero_copy=True)
    with (
        WorkerPool(Nobody, config=config) as pool,
        pytest.raises(ForeignMemoryError, match=r"a member that changes its user \(setuid\)"),
    ):
        pool.call("ones", 1 << 20)


def drive() -> None:
    config = PoolConfig(stack_seconds=0.1, kill_seconds=0.1)
    with WorkerPool(Worker, tp=2, config=config) as pool:
        say([status.pid for status in pool.status()])
        become_nobody()
        assert pool.call("total", 1.0) == 2.0
        with suppress(CallTimeoutError):
            pool.call("hold_python", [0, 1], timeout=0.1)
        pool.shutdown(0.1)


@needs_root
def test_a_driver_that_becomes_another_user_ends_its_workers() -> None:
    program = Program(drive)
    pids: list[int] = json.loads(program.stdout.readline())
    _, errors = program.communicate()
    assert (program.returncode, errors) == (0, "")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # noqa: PTH110
