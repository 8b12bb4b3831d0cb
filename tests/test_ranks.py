from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_environment import MPS_FOLDER, SIDE_BY_SIDE
from tests.commands import run_code
from tests.ranks import PRELOADED, RanksFailedError, init_gloo, run_ranks


@dataclass
class Argument:
    value: int


def add(rank: int, n: int, argument: Argument) -> Argument:
    return Argument(argument.value + rank + n)


def all_reduce(rank: int, n: int, path: str) -> list[float]:
    init_gloo(rank, n, path)
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    return x.tolist()


def fail_on_one(rank: int, n: int) -> None:
    if rank == 1:
        raise KeyError("wanted")


def sleep_on_one(rank: int, n: int, folder: str) -> None:
    if rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
        time.sleep(60)


def warn(rank: int, n: int) -> None:
    warnings.warn("careful", stacklevel=2)


def die(rank: int, n: int) -> str:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_results_come_by_rank_and_types_of_the_test_module_travel() -> None:
    assert run_ranks(3, add, Argument(10)) == [Argument(13), Argument(14), Argument(15)]


def test_gloo(store_path: str) -> None:
    assert run_ranks(2, all_reduce, store_path) == [[3.0], [3.0]]


def test_the_failing_rank_s_traceback_is_told() -> None:
    with pytest.raises(RanksFailedError, match="KeyError: 'wanted'") as caught:
        run_ranks(2, fail_on_one)
    assert set(caught.value.failures) == {1}
    assert "fail_on_one" in caught.value.failures[1]


def test_a_hang_shows_the_stack_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="sleep_on_one") as caught:
        run_ranks(2, sleep_on_one, str(tmp_path), timeout=5)
    assert set(caught.value.failures) == {1}
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_warning_is_an_error() -> None:
    with pytest.raises(RanksFailedError, match="UserWarning: careful"):
        run_ranks(1, warn)


def test_death_is_a_failure_unless_expected() -> None:
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, die)
    assert run_ranks(2, die, may_die=[0]) == [None, "alive"]


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(1, lambda *_: None)


def begun_with(rank: int, n: int, name: str) -> str | None:
    """A variable as it was when this process began: before it imported anything."""
    began = Path("/proc/self/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in began if "=" in line).get(name)


def test_variables_are_there_before_a_rank_imports_anything() -> None:
    assert run_ranks(2, begun_with, "FOR_A_RANK", environment={"FOR_A_RANK": "x"}) == ["x", "x"]
    assert "FOR_A_RANK" not in os.environ
    assert run_ranks(1, begun_with, "FOR_A_RANK", environment={}) == [None]


def test_ranks_begin_with_what_kernels_need_side_by_side() -> None:
    for name in SIDE_BY_SIDE:
        assert run_ranks(1, begun_with, name) == [os.environ[name]]
    assert run_ranks(1, begun_with, MPS_FOLDER) == [os.devnull]


COUNT_TOUCHES = """
import importlib, importlib.util, sys, traceback
import torch
def touch(*args, **kwargs):
    traceback.print_stack()
    return 0
for name in ("_lazy_init", "init", "is_available", "device_count", "get_device_properties"):
    setattr(torch.cuda, name, touch)
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount = touch
for module in sys.argv[1:]:
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        importlib.import_module(module)
"""


def test_what_ranks_and_workers_are_forked_from_touches_no_cuda() -> None:
    """A process that was forked from one that has cannot use it."""
    preloaded = (*PRELOADED, "coordinator.groups", "server.worker")
    done = run_code(COUNT_TOUCHES, *preloaded)
    assert "touch" not in done.stderr, done.stderr


def use_cuda(rank: int, n: int) -> float:
    assert not torch.cuda.is_initialized()
    assert not torch.cuda._is_in_bad_fork()
    return float(torch.ones(3, device="cuda").sum())


@pytest.mark.gpu
def test_a_forked_rank_can_use_cuda() -> None:
    assert run_ranks(2, use_cuda) == [3.0, 3.0]
