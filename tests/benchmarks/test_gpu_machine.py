"""What machines with a GPU run: few packages, a bundle; one clear line where no GPU is."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, run_code, run_to_end
from tests.lean_python import lean_variables
from tests.programs import Program, run_module

THERE = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "pytest", "msgspec", "pyzmq")
LIMIT = 300
"""Seconds for a command that imports torch on a loaded machine."""
N_TESTS = 31
"""How many tests need a GPU, at least."""

# --- Without a GPU ------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("module", ["gpu", "gpu_first", "gpu_soak", "gpu_pool", "gpu_report"])
def test_without_a_gpu_there_is_one_clear_line(module: str, tmp_path: Path) -> None:
    program = Program(run_module, f"benchmarks.{module}", str(tmp_path))
    stdout, stderr = program.communicate()
    assert (program.returncode, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert "no GPU: torch sees no CUDA device" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_make_gpu_test_uses_the_given_python_and_says_what_is_missing() -> None:
    done = run_to_end("make", "gpu-test", f"PYTHON={sys.executable}", status=2, timeout=LIMIT)
    assert done.stderr.splitlines()[0] == "no GPU: torch sees no CUDA device"
    assert "pip" not in done.stdout
    shown = run_to_end("make", "-n", "gpu-test", "PYTHON=/given/python", timeout=LIMIT).stdout
    assert "/given/python -m pytest -m gpu" in shown
    assert "pip" not in shown
    assert ".venv" not in shown


# --- With as few packages as such machines have -------------------------------------------


HIDDEN = ("hypothesis", "psutil", "starlette", "httpx", "transformers", "safetensors")
RANKS = "tests/benchmarks/test_gpu_ranks.py"
WORKING = (
    f"{RANKS}::test_the_encoder_is_the_same_in_a_grid",
    f"{RANKS}::test_the_first_look_is_at_all_small_collectives",
)


@pytest.fixture
def lean(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTEST_ADDOPTS": ""} | lean_variables(tmp_path, THERE)


def run_lean(variables: dict[str, str], *words: str) -> str:
    return run_to_end(sys.executable, *words, env=variables, timeout=LIMIT).stdout


def test_programs_and_tests_for_gpus_import_no_other_packages(lean: dict[str, str]) -> None:
    programs = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("gpu*.py")]
    assert "benchmarks.gpu_report" in programs
    code = f"""
import importlib.util, sys, warnings, numpy, pytest, msgspec, zmq
assert not any(importlib.util.find_spec(name) for name in {HIDDEN})
import {", ".join(programs)}
warnings.resetwarnings()
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q"]))
"""
    listed = run_lean(lean, "-W", "error", "-c", code)
    names = [line for line in listed.splitlines() if "::" in line]
    files = {name.partition("::")[0] for name in names}
    assert len(names) >= N_TESTS
    assert {"test_ipc_gpu", "test_nccl_gpu", "test_cuda_gpu", "test_pool_gpu"} <= {
        Path(file).stem for file in files
    }


def test_pools_and_ranks_need_no_other_packages(lean: dict[str, str]) -> None:
    ran = run_lean(lean, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WORKING)
    assert "2 passed" in ran


# --- The bundle of make gpu-bundle --------------------------------------------------------

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = "manylinux_2_17_x86_64.manylinux2014_x86_64"


def make(*words: str, **variables: str) -> str:
    return run_to_end("make", *words, env=os.environ | variables, timeout=LIMIT).stdout


def offer(folder: Path, name: str, python: str) -> None:
    """An index of one wheel more: of the version that constraints.txt names."""
    (version,) = re.findall(rf"^{name}==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    tag = "cp" + python.replace(".", "")
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}-{tag}-{TAG}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version, python = {version!r}, {python!r}\n")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}-{tag}-{TAG}\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this Python, of wheels that are offered for this one and another one."""
    offered, folder = tmp_path_factory.mktemp("offered"), tmp_path_factory.mktemp("made") / "it"
    for name in ("msgspec", "pyzmq", "safetensors"):
        for python in (HERE, "3.99"):
            offer(offered, name, python)
    words = ("gpu-bundle", f"PYTHON={sys.executable}", f"BUNDLE={folder}", f"BUNDLE_PYTHON={HERE}")
    make(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(offered), CFLAGS="-O0")
    return folder


def test_the_bundle_holds_packages_and_extensions_for_that_python(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {HERE}
    assert {path.name for path in (bundle / HERE).iterdir()} == {"site", "built"}
    for name in ("msgspec", "pyzmq", "safetensors"):
        assert f"{HERE!r}" in (bundle / HERE / "site" / f"{name}.py").read_text()
    built = sorted(path.relative_to(bundle / HERE / "built") for path in bundle.rglob("*.so"))
    assert list(map(str, built)) == ["device_comm/_native.abi3.so", "shm_broadcast/_native.abi3.so"]
    code = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
for path in sys.argv[1:]:
    spec = spec_from_file_location("its._native", path)
    spec.loader.exec_module(module_from_spec(spec))
"""
    paths = [str(bundle / HERE / "built" / path) for path in built]
    run_code(code, *paths)


@pytest.mark.parametrize("goal", ["gpu-test", "gpu-report"])
def test_the_bundle_is_used_by_its_python(goal: str, bundle: Path, tmp_path: Path) -> None:
    shown = make("-n", goal, f"PYTHON={sys.executable}", f"BUNDLE={bundle}")
    site = f"PYTHONPATH={bundle / HERE / 'site'} {sys.executable}"
    assert shown.count(f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {site}") == 2
    assert f"cp -R {bundle / HERE / 'site'}/../built/. ." in shown
    assert "setup.py" not in shown
    other = make("-n", goal, f"PYTHON={sys.executable}", f"BUNDLE={tmp_path}")
    assert "PYTHONPATH" not in other
    assert "setup.py -q build_ext --inplace" in other
