"""The commands for GPUs, where there is none: what they refuse, and how they count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness import Report
from tests.commands import run_to_end
from tests.programs import Program, run_module

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
LIMIT = 240
"""Seconds for a command that imports torch, on a machine with more to do."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize(
    "module", ["gpu", "gpu_first", "gpu_soak", "gpu_pool", "gpu_report", "gpu_world"]
)
def test_without_a_gpu_there_is_one_clear_line(module: str, tmp_path: Path) -> None:
    program = Program(run_module, f"benchmarks.{module}", str(tmp_path))
    stdout, stderr = program.communicate()
    assert (program.returncode, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert "no GPU: torch sees no CUDA device" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_make_gpu_test_uses_the_given_python_and_says_what_is_missing() -> None:
    done = run_to_end("make", "gpu-test", f"PYTHON={PYTHON}", status=2, timeout=LIMIT)
    assert done.stderr.splitlines()[0] == "no GPU: torch sees no CUDA device"
    assert "pip" not in done.stdout
    shown = subprocess.run(
        ["make", "-n", "gpu-test", "PYTHON=/given/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    ).stdout
    assert "/given/python -m pytest -m gpu" in shown
    assert "pip" not in shown
    assert ".venv" not in shown


def test_bandwidth_counts_inputs_once_and_outputs_once(capsys: pytest.CaptureFixture[str]) -> None:
    size = 1 << 20
    traffic = {verb: gpu.Work(verb, size).traffic(4) / size for verb in gpu.VERBS}
    assert traffic == {
        "all_reduce": 8,
        "all_gather": 5,
        "reduce_scatter": 5,
        "broadcast": 4,
        "barrier": 0,
    }
    work, found = gpu.Work("all_reduce", size), Report({})
    samples: gpu.Timed = {("captured", "all_reduce bfloat16 1 MiB", "ours"): [[4e-6], [4e-6]]}
    gpu.add(found, [work], samples, "ranks as streams", 2, 2e12)
    assert (found.rows[0].work, found.rows[0].median) == ("all_reduce captured", pytest.approx(4))
    # 4 MiB in 4 us are 1.05 TB/s.
    assert "1048.6 GB/s,  52.4 % of a copy" in capsys.readouterr().out
