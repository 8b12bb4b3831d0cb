"""Pools where the system refuses calls, threads or processes, or kills a worker for its memory."""

from __future__ import annotations

import errno
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from server.config import PoolConfig
from server.errors import (
    CallStuckError,
    CallTimeoutError,
    ProcessLimitError,
    WorkerLostError,
    WorkerStartError,
)
from server.launchers import local
from server.launchers.fork_servers import FORK_SERVERS
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast.cpu import memory_kills
from tests.patience import until
from tests.ranks import run_ranks
from tests.refusals import NEW_PROCESSES, refuse
from tests.refused_threads import refusing_threads
from tests.server.test_forking import at_start
from tests.server.test_process_limits import run_limited
from tests.server.test_resources import system
from tests.server.workers import Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def start(_: int, __: int, number: int, names: Sequence[str], fork: bool) -> tuple[Any, ...]:
    refuse(number, *names)
    threads, children = threading.active_count(), psutil.Process().children()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the tests look at it
        WorkerPool(Worker, tp=2, config=PoolConfig(fork=fork))
    assert threading.active_count() == threads
    FORK_SERVERS.close()
    left = [each.name() for each in psutil.Process().children() if each not in children]
    return type(caught.value), caught.value.errno, str(caught.value), left


LIMIT = "no further process or thread can be started: this user may have "


@pytest.mark.parametrize(
    ("refused", "fork", "kind", "number", "text"),
    [
        (["pidfd_open"], True, OSError, errno.ENOSYS, "pidfd_open is refused here: Function not"),
        (["pidfd_open"], False, OSError, errno.ENOSYS, "pidfd_open is refused here: Function not"),
        (["eventfd2"], False, OSError, errno.ENOSYS, "eventfd is refused here: Function not impl"),
        (NEW_PROCESSES, True, ProcessLimitError, errno.EAGAIN, LIMIT),
    ],
)
def test_a_pool_names_the_refused_system_call_and_leaves_no_process(
    refused: Sequence[str], fork: bool, kind: type[OSError], number: int, text: str
) -> None:
    (found,) = run_ranks(1, start, number, refused, fork)
    assert issubclass(found[0], kind)
    assert (found[1], text in found[2], found[3]) == (number, True, [])


def test_calls_time_out_where_no_further_thread_may_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WorkerPool(Worker, stuck_after=3.0) as pool:

        def refuse_thread(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(CallTimeoutError, match="sleep"):
            pool.call("sleep", 600.0, timeout=0.2)
        with pytest.raises(CallTimeoutError, match="echo"):
            pool.submit("echo", timeout=0.2).result(60)
        with pytest.raises(CallStuckError, match="sleep"):
            pool.call("echo", timeout=60.0)


@pytest.mark.parametrize(
    ("refused", "make"),
    [
        ("pool-collector", partial(WorkerPool, Worker, tp=2)),
        ("pool-supervisor", partial(WorkerPool, Worker, tp=2)),
        ("start-replica-1", partial(Replicas, Worker, dp=2)),
    ],
)
def test_a_refused_thread_leaves_no_other_one(refused: str, make: Callable[[], object]) -> None:
    with refusing_threads(refused), pytest.raises(ProcessLimitError):
        make()
    until(
        lambda: (
            not any(
                each.name.startswith("pool-") or "-replica-" in each.name
                for each in threading.enumerate()
            )
        )
    )


@pytest.mark.parametrize(
    ("replaced", "tp", "reason"),
    [
        ("os.fork", 1, "no process can be forked: Resource temporarily unavailable"),
        ("threading.Thread.start", 2, "can't start new thread"),
    ],
)
def test_a_worker_that_may_start_no_process_or_thread_gives_the_reason(
    replaced: str, tp: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"""
import sys
if "boot.py" in " ".join(sys.orig_argv):
    import errno, os, threading
    def refuse(*_):
        if "{replaced}" == "os.fork":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        raise RuntimeError("can't start new thread")
    {replaced} = refuse
"""
    with at_start(monkeypatch, tmp_path, code), pytest.raises(WorkerStartError, match=reason):
        WorkerPool(Worker, tp=tp, config=PoolConfig(fork=False))


V1 = "33 31 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
EVENTS = "low 0\nhigh 0\nmax 7\noom 1\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "file", "counts"),
    [
        ("0::/\n", V2, "memory.events", EVENTS),
        ("0::/system.slice/ours.service\n", V2, "system.slice/ours.service/memory.events", EVENTS),
        ("0::/pod/no-memory-controller\n", V2, "pod/memory.events", EVENTS),
        ("3:memory:/job\n2:cpu:/\n0::/\n", V1 + V2, "memory/job/memory.oom_control", CONTROL),
    ],
    ids=["container", "unit", "around", "version 1"],
)
def test_a_kill_by_the_kernel_for_memory_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    groups: str,
    mounts: str,
    file: str,
    counts: str,
) -> None:
    assert memory_kills(tmp_path) == 0
    system(tmp_path, groups, mounts, **{file.replace("/", "__"): counts.format(2)})
    monkeypatch.setattr(local, "memory_kills", partial(memory_kills, tmp_path))
    with WorkerPool(Worker, tp=2) as pool:
        (tmp_path / "sys/fs/cgroup" / file).write_text(counts.format(3))
        os.kill(pids_of(pool)[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            pool.call("total", 1.0)
    assert caught.value.end == (
        "killed by SIGKILL (the kernel has killed 1 here for want of memory since it started)"
    )


STARVED = """
from server import WorkerLostError, WorkerPool

try:
    with WorkerPool("tests.server.workers:Worker", tp=2) as pool:
        pool.call("swell", 1)
except WorkerLostError as error:
    print(error.rank, error.end)
"""


def test_the_kernel_kills_a_worker_in_a_group_that_has_no_memory_left() -> None:
    done = run_limited(STARVED, "memory", "memory.limit_in_bytes", 1 << 30)
    told = "1 killed by SIGKILL (the kernel has killed 1 here for want of memory since it"
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(told), done.stderr
