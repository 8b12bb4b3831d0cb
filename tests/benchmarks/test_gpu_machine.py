"""What is run on a machine with a GPU, in a Python that has as little as such machines have."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.commands import run_to_end
from tests.lean_python import lean_variables

ROOT = Path(__file__).parents[2]
THERE = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "pytest", "msgspec", "pyzmq")
LIMIT = 300
N_TESTS = 31
"""How many tests need a GPU, at least."""


@pytest.fixture
def lean(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTEST_ADDOPTS": ""} | lean_variables(tmp_path, THERE)


def run(variables: dict[str, str], *words: str) -> str:
    return run_to_end(sys.executable, *words, env=variables, timeout=LIMIT).stdout


def test_other_packages_are_hidden_here(lean: dict[str, str]) -> None:
    code = """
import importlib.util, torch, numpy, pytest, msgspec, zmq
for name in ("hypothesis", "psutil", "starlette", "httpx", "transformers", "safetensors"):
    assert importlib.util.find_spec(name) is None, name
"""
    run(lean, "-c", code)


def test_all_tests_that_need_a_gpu_are_collected(lean: dict[str, str]) -> None:
    listed = run(lean, "-m", "pytest", "-m", "gpu", "--collect-only", "-q")
    names = [line for line in listed.splitlines() if "::" in line]
    files = {name.partition("::")[0] for name in names}
    assert len(names) >= N_TESTS
    assert {"test_ipc_gpu", "test_nccl_gpu", "test_cuda_gpu", "test_pool_gpu"} <= {
        Path(file).stem for file in files
    }


def test_all_programs_for_gpus_are_imported(lean: dict[str, str]) -> None:
    programs = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("gpu*.py")]
    assert "benchmarks.gpu_report" in programs
    run(lean, "-W", "error", "-c", f"import {', '.join(programs)}")


@pytest.mark.parametrize(
    "works",
    [
        "tests/benchmarks/test_gpu_model.py::test_it_is_the_same_however_it_is_cut[2-1]",
        "tests/device_comm/test_shm_comm.py::test_table[2-fast]",
    ],
    ids=["pool", "ranks"],
)
def test_pools_and_ranks_work_with_no_more(works: str, lean: dict[str, str]) -> None:
    assert "1 passed" in run(lean, "-m", "pytest", "-q", "-p", "no:cacheprovider", works)
