"""The helpers of tests: ranks, programs, and threads that are held up."""

# ruff: noqa: T201 - programs print

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_environment import MPS_FOLDER, SIDE_BY_SIDE
from tests.commands import ROOT, run_code
from tests.programs import Program
from tests.ranks import PRELOADED, RanksFailedError, run_ranks


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


def test_the_failing_rank_s_traceback_is_shown() -> None:
    with pytest.raises(RanksFailedError, match="KeyError: 'wanted'") as caught:
        run_ranks(2, fail_on_one)
    assert set(caught.value.failures) == {1}
    assert "fail_on_one" in caught.value.failures[1]


def test_a_hang_shows_the_stack_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="sleep_on_one") as caught:
        run_ranks(2, sleep_on_one, str(tmp_path), timeout=3)
    assert set(caught.value.failures) == {1}
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_warning_is_an_error() -> None:
    with pytest.raises(RanksFailedError, match="UserWarning: careful"):
        run_ranks(1, warn)


def test_death_is_a_failure_unless_expected() -> None:
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, die)
    assert run_ranks(2, die, may_die=[0]) == [None, "alive"]


def begun_with(rank: int, n: int, name: str) -> str | None:
    """A variable as it was when this process began: before it imported anything."""
    began = Path("/proc/self/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in began if "=" in line).get(name)


def test_variables_are_there_before_a_rank_imports_anything() -> None:
    assert run_ranks(1, begun_with, "FOR_A_RANK", environment={"FOR_A_RANK": "x"}) == ["x"]
    assert "FOR_A_RANK" not in os.environ


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


# --- programs ------------------------------------------------------------------------------


class Finalized:
    def __del__(self) -> None:
        os.write(1, b"finalized\n")


KEPT: list[Finalized] = []


def speak() -> None:
    time.sleep(0.1)
    print("thread")


def end(how: str) -> None:
    KEPT.append(Finalized())
    atexit.register(print, "at exit")
    print("pid", os.getpid(), sys.argv[1:], os.getsid(0) == os.getpid())
    print(os.environ.get("A_WORD"), file=sys.stderr)
    threading.Thread(target=speak).start()
    if how == "raises":
        raise ValueError("the program's own")
    if how == "exits":
        sys.exit(3)


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_a_program_ends_as_python_does(
    how: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_WORD", "said")
    program = Program(end, how)
    said, errors = program.communicate()
    assert program.returncode == status
    assert said.splitlines() == [
        f"pid {program.pid} ['{how}'] True",
        *("thread", "at exit", "finalized"),
    ]
    assert errors.splitlines()[0] == "said"
    last = "ValueError: the program's own" if how == "raises" else "said"
    assert errors.splitlines()[-1] == last


# --- threads that tests/jitter holds up ------------------------------------------------------

SCRIPT = """
import os, sitecustomize, sys, threading
paused = []
sitecustomize.pause = paused.append

def run(file, n=1):
    names = {}
    exec(compile(f"def step(n):\\n    n += {n}\\n    return n", file, "exec"), names)
    before = len(paused)
    for _ in range(10_000):
        names["step"](1)
    return len(paused) - before

elsewhere = run("/elsewhere/step.py")
here = run(os.path.join(sys.argv[1], "server", "step.py"))
found = []
code = os.path.join(sys.argv[1], "tests", "step.py")
thread = threading.Thread(target=lambda: found.append(run(code, 2)))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(run(os.path.join(sys.argv[1], "server", "step.py")))
print(elsewhere, here, *found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(max(paused) <= 0.25, min(paused) >= 0)
"""


def test_threads_are_held_up_in_the_library_and_its_tests() -> None:
    """Twelve times in each function, in each process."""
    done = run_code(
        SCRIPT,
        str(ROOT),
        env={"JITTER": "0.25", "PYTHONPATH": str(ROOT / "tests" / "jitter")},
    )
    assert done.stdout.split() == ["0", "12", "12", "12", "True", "True"]
