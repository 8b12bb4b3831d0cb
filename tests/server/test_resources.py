"""Which cores, threads and GPUs workers get: by files of the system and by arguments."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from server.cli import main
from server.driver.binding import assign, cpu_quota, usable_cores, worker_threads
from server.pool import WorkerPool
from tests.server.workers import Worker

pytestmark = pytest.mark.quick

# --- cores and threads --------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("cgroup", "root", "limits", "cores"),
    [
        ("/pod/box", "/", {"pod__box__cpu.max": "150000 100000"}, 1.5),
        ("/pod/box", "/", {"pod__box__cpu.max": "max 100000"}, math.inf),
        # What a group lies in limits it too.
        (*("/pod/box", "/"), {"pod__cpu.max": "200000 1000", "pod__box__cpu.max": "4 1"}, 4.0),
        (*("/pod/box", "/"), {"pod__cpu.max": "2 1", "pod__box__cpu.max": "400000 100000"}, 2.0),
        # A container's group is its root.
        ("/docker/abc", "/docker/abc", {"cpu.max": "100000 100000"}, 1.0),
        ("/", "/", {"cpu.max": "100000 100000"}, 1.0),
        ("/../sibling", "/", {"cpu.max": "100000 100000"}, 1.0),
        ("/pod", "/", {"pod__cpu.max": "nonsense"}, math.inf),
    ],
)
def test_a_quota_of_version_2(
    cgroup: str, root: str, limits: dict[str, str], cores: float, tmp_path: Path
) -> None:
    assert cpu_quota(tmp_path) == math.inf  # nothing can be read
    assert cpu_quota(system(tmp_path, f"0::{cgroup}\n", V2.format(root=root), **limits)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("300000", 3.0), ("-1", math.inf)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, cores: float) -> None:
    folder = "cpu,cpuacct__pod__cpu"
    limits = {f"{folder}.cfs_quota_us": quota, f"{folder}.cfs_period_us": "100000"}
    groups = "4:memory:/elsewhere\n3:cpu,cpuacct:/pod\n0::/\n"
    assert cpu_quota(system(tmp_path, groups, V1.format(root="/"), **limits)) == cores


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


# --- GPUs ---------------------------------------------------------------------------------------


FEW = "several ranks on one need share_gpu=True or --share"
NAMES = "device must be .cpu., .cuda. or one GPU as .cuda:0.; got "


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "share", "expected"),
    [
        ("cpu", 2, 0, False, ["cpu", "cpu"]),
        ("cpu", 2, 8, False, ["cpu", "cpu"]),
        ("cuda", 2, 2, False, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 8, True, ["cuda:0", "cuda:1"]),
        ("cuda", 4, 1, True, ["cuda:0"] * 4),
        ("cuda", 5, 2, True, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 1, 2, False, ["cuda:1"]),
        ("cuda:1", 2, 2, True, ["cuda:1", "cuda:1"]),
        ("cuda", 1, 0, False, "device 'cuda': torch sees no CUDA device"),
        ("cuda", 1, 0, True, "torch sees no CUDA device"),
        ("cuda", 3, 2, False, f"3 ranks for 2 GPUs: {FEW}"),
        ("cuda", 2, 1, False, f"2 ranks for 1 GPU: {FEW}"),
        ("cuda:0", 2, 8, False, "2 ranks for 1 GPU"),
        ("cuda:2", 1, 2, False, "device 'cuda:2': there are 2 GPUs, numbered from 0"),
        ("cpu", 2, 2, True, "sharing a GPU is for device 'cuda'; got 'cpu'"),
        *((each, 1, 1, False, f"{NAMES}.{each}.") for each in ("abacus", "mps", "cpu:1")),
    ],
)
def test_ranks_get_gpus_or_an_error(
    device: str, ranks: int, gpus: int, share: bool, expected: list[str] | str
) -> None:
    if isinstance(expected, list):
        assert list(assign(device, ranks, gpus, share)) == expected
        return
    with pytest.raises(ValueError, match=expected):
        assign(device, ranks, gpus, share)


def test_a_pool_asks_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks for 1 GPU"):
        WorkerPool(Worker, tp=2, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "gpus", "text"),
    [
        (["--device=cuda", "--tp=2", "--pp=2"], 2, "4 ranks for 2 GPUs"),
        (["--dtype=int3"], 1, "--dtype: invalid choice: 'int3'"),
    ],
)
def test_commands_end_with_status_2_and_one_line(
    arguments: list[str],
    gpus: int,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(SystemExit) as info:
        main(["serve", *arguments])
    stdout, stderr = capfd.readouterr()
    assert (info.value.code, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert stderr.startswith("group-coordinator serve: error: ")
    assert text in stderr
