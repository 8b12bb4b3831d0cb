"""How many threads workers get: of the cores, the control group's quota, and what the user says."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from server import WorkerPool
from server.driver.binding import cpu_quota, usable_cores, worker_threads
from tests.commands import run_code, run_to_end
from tests.patience import until

if TYPE_CHECKING:
    from subprocess import CompletedProcess

V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n"


def system(root: Path, cgroup: str, mountinfo: str, **files: str) -> Path:
    """The files of a system; of paths below /sys/fs/cgroup, ``__`` stands for a slash."""
    for path, text in {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": OTHER + mountinfo,
        **{f"sys/fs/cgroup/{path.replace('__', '/')}": text for path, text in files.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 1.5), ("max 100000", math.inf)])
def test_a_quota_of_version_2(tmp_path: Path, limit: str, cores: float) -> None:
    at = system(tmp_path, "0::/pod/box\n", V2.format(root="/"), **{"pod__box__cpu.max": limit})
    assert cpu_quota(at) == cores


def test_what_a_group_lies_in_limits_it_too(tmp_path: Path) -> None:
    limits = {"pod__cpu.max": "200000 100000", "pod__box__cpu.max": "400000 100000"}
    at = system(tmp_path, "0::/pod/box\n", V2.format(root="/"), **limits)
    assert cpu_quota(at) == 2.0


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("300000", 3.0), ("-1", math.inf)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, cores: float) -> None:
    folder = "cpu,cpuacct__pod__cpu"
    at = system(
        tmp_path,
        "4:memory:/elsewhere\n3:cpu,cpuacct:/pod\n0::/\n",
        V1.format(root="/"),
        **{f"{folder}.cfs_quota_us": quota, f"{folder}.cfs_period_us": "100000"},
    )
    assert cpu_quota(at) == cores


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../sibling"])
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, path: str) -> None:
    root = "/docker/abc" if path == "/docker/abc" else "/"
    limits = {"cpu.max": "100000 100000"}
    at = system(tmp_path, f"0::{path}\n", V2.format(root=root), **limits)
    assert cpu_quota(at) == 1.0


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    limits = {"pod__cpu.max": "nonsense"}
    assert cpu_quota(system(tmp_path, "0::/pod\n", V2.format(root="/"), **limits)) == math.inf


@pytest.mark.parametrize(
    ("quota", "usable"), [(0.1, 1), (1.0, 1), (math.inf, len(os.sched_getaffinity(0)))]
)
def test_less_than_a_core_is_one(
    quota: float, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.driver.binding.cpu_quota", lambda: quota)
    assert usable_cores() == usable


@pytest.mark.parametrize(
    ("said", "threads"),
    [("3", 3), ("2,1", 2), (" 4 ", 4), ("", None), ("0", None), ("x", None), ("9" * 9, None)],
)
def test_what_the_user_says_counts(said: str, threads: int | None) -> None:
    assert worker_threads(1, (), {"OMP_NUM_THREADS": said}) == (threads or usable_cores())
    assert worker_threads(1000, (), {"OMP_NUM_THREADS": said}) == (threads or 1)


DRIVER = """
from server import WorkerPool
with WorkerPool("tests.server.workers:Worker") as pool:
    print(pool.call("environment")["threads"])
"""


def threads_of(**environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return run_code(DRIVER, env={**clean, **environment}).stdout


def test_workers_have_as_many_threads() -> None:
    assert threads_of(OMP_NUM_THREADS="1") == "1\n"
    assert threads_of() == f"{usable_cores()}\n"


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
    """Remove a control group, which takes a while where its processes have just ended."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_a_process_in_a_group_with_a_quota_keeps_to_it() -> None:
    code = "from server.driver.binding import *; print(cpu_quota(), usable_cores())"
    done = run_limited(code, "cpu", "cpu.cfs_quota_us", 170_000)
    assert done.stdout == "1.7 1\n", done.stderr


@pytest.mark.parametrize(
    ("said", "used"), [(None, ("PASSIVE", "10000")), ("ACTIVE", ("ACTIVE", None))]
)
def test_a_workers_threads_soon_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: str | None, used: tuple[str, str | None]
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if said:
        monkeypatch.setenv("OMP_WAIT_POLICY", said)
    with WorkerPool("tests.server.workers:Worker") as pool:
        assert pool.call("environment")["waiting"] == used
