"""Where too few files may be open (``ulimit -n``): what pools and services say of it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.http_served import COMMAND
from server.config import PoolConfig
from server.driver.limits import open_files
from server.errors import DescriptorLimitError, RestartLimitError
from server.hosts.host_supervisor import serve_host
from server.hosts.place import Hosts
from server.launchers.fork_servers import FORK_SERVERS
from server.pool import WorkerPool
from tests.commands import run_to_end
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.over_hosts import PATIENT, PORT, SECRET
from tests.server.workers import Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable


def at_most(files: int) -> None:
    """Let this process have no more files open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def refused(limit: int) -> tuple[int, int, str]:
    """What the error of a pool within a limit says; its traceback, which holds files, is let go."""
    at_most(limit)
    try:
        WorkerPool(Worker, tp=2).shutdown()
    except DescriptorLimitError as error:
        return error.limit, error.needed, str(error)
    raise AssertionError(f"{limit} files are enough")


def in_vain(_: int, __: int) -> list[tuple[int, int]]:
    """A few more files than are open, and how many are said to be needed, which do."""
    began = open_files()
    found = []
    for limit in (began + 1, began + 9, began + 29):
        for _ in range(2):
            given, needed, told = refused(limit)
        assert given == limit
        assert f"{limit} files open (RLIMIT_NOFILE, ulimit -n), and needs about {needed}" in told
        found.append((limit, needed))
    # A file for stacks, and what fork servers take: of two limits, one each.
    assert open_files() <= began + 1 + 2 * 2
    at_most(needed)
    FORK_SERVERS.close()  # servers keep the limits of their start
    with WorkerPool(Worker, tp=2) as pool:
        assert pool.call("total", 1.0) == 2.0
    return found


def test_a_pool_says_how_many_files_it_needs_and_works_with_these() -> None:
    (found,) = run_ranks(1, in_vain)
    assert all(limit < needed for limit, needed in found), found


def is_restarted_in_vain(_: int, __: int) -> str:
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=1) as pool:
        pids = pids_of(pool)
        at_most(open_files() + 2)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: pool.failure is not None)
        assert isinstance(pool.failure, RestartLimitError)
        return pool.failure.failure


def test_a_pool_that_cannot_be_restarted_for_lack_of_files_says_so() -> None:
    (failure,) = run_ranks(1, is_restarted_in_vain)
    assert "RLIMIT_NOFILE" in failure


def test_a_service_that_may_have_too_few_files_says_how_many_it_needs() -> None:
    command = ["prlimit", "--nofile=24:24", sys.executable, "-c", COMMAND, "serve"]
    done = run_to_end(*command, "--port", "0", status=1, timeout=PATIENCE_SECONDS)
    assert "DescriptorLimitError: this process may have 24 files open" in done.stderr
    assert done.stderr.count("\n") == 1


def take_part(rank: int, _: int) -> str:
    """A host of two: where libzmq may open too few files, it ends the process."""
    here = Hosts(2, rank, "127.0.0.1", PORT, SECRET)
    begin: Callable[[], object] = partial(serve_host, here, PATIENCE_SECONDS)
    if here.is_head:
        begin = partial(WorkerPool, Worker, tp=2, launcher="hosts", hosts=here)
    at_most(open_files() + 20)
    with pytest.raises(DescriptorLimitError) as caught:
        begin()
    return str(caught.value)


def test_hosts_that_may_open_too_few_files_say_so() -> None:
    assert all("RLIMIT_NOFILE" in told for told in run_ranks(2, take_part))


def restart_one_of_six(rank: int, _: int) -> bool:
    """A host of two; whether all workers but the one that was killed are the same afterwards."""
    here = Hosts(2, rank, "127.0.0.1", PORT, SECRET, silence_seconds=PATIENT)
    if not here.is_head:
        serve_host(here, PATIENCE_SECONDS)
        return True
    at_most(open_files() + 224)  # the start takes 124, the restart 195
    config = PoolConfig(leave_seconds=PATIENCE_SECONDS)
    options: dict[str, Any] = {"launcher": "hosts", "hosts": here, "restart": "worker"}
    with WorkerPool(Worker, tp=6, config=config, **options) as pool:
        before = pids_of(pool)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: pool.generation > 1)
        after = pids_of(pool)
        return pool.generation == 2 and before[0] != after[0] and before[1:] == after[1:]


def test_a_restart_over_hosts_counts_files_of_the_workers_that_it_starts_only() -> None:
    assert all(run_ranks(2, restart_one_of_six))
