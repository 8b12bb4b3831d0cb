"""The commands for GPUs, where there is none: what they refuse, and how reports are made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_report
from benchmarks.gpu_report import Step, carry_out, markdown, report, steps
from benchmarks.harness import Report

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
LIMIT = 240
"""Seconds for a command that imports torch, on a machine with more to do."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("module", ["gpu", "gpu_soak", "gpu_pool", "gpu_report", "gpu_world"])
def test_without_a_gpu_there_is_one_clear_line(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", f"benchmarks.{module}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no GPU: torch sees no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_make_gpu_test_uses_the_given_python_and_says_what_is_missing() -> None:
    done = subprocess.run(
        ["make", "gpu-test", f"PYTHON={PYTHON}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
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


def words(code: str) -> tuple[str, ...]:
    return (PYTHON, "-c", code)


def test_steps_report_what_they_wrote_and_how_they_ended() -> None:
    wrote = "import json, sys; json.dump({'rate': 3}, open(sys.argv[1], 'w')); print('hello')"
    passed = carry_out(Step("a", "works", (*words(wrote), "{json}"), 20), dict(os.environ))
    assert (passed.state, passed.found, passed.tail) == ("passed", {"rate": 3}, "hello\n")
    failed = carry_out(Step("b", "fails", words("raise SystemExit('no')"), 20), dict(os.environ))
    assert (failed.state, failed.found, failed.tail) == ("failed", None, "no\n")
    missing = carry_out(Step("c", "x", words(""), 20, "no-such-tool"), dict(os.environ))
    assert (missing.state, missing.tail) == ("left out", "no-such-tool is not installed")


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_hangs_ends_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    outcome = carry_out(Step("hangs", "x", words(code), 5.0), dict(os.environ))
    assert outcome.state == "out of time"
    while runs(pid.read_text()):
        assert time.monotonic() - began < 30
        time.sleep(0.02)


def test_a_report_is_written_whatever_becomes_of_a_step(tmp_path: Path) -> None:
    said: list[str] = []
    chosen = [
        Step("good", "that it works", words("print(1)"), 20),
        Step("bad", "that it does not", words("raise SystemExit(3)"), 20),
        Step("gone", "nothing", words(""), 20, "no-such-tool"),
    ]
    status = report(chosen, {"device": "NVIDIA Test"}, tmp_path / "out", said.append)
    assert status == 1
    whole = json.loads((tmp_path / "out.json").read_text())
    assert whole["facts"] == {"device": "NVIDIA Test"}
    assert [step["state"] for step in whole["steps"]] == ["passed", "failed", "left out"]
    text = (tmp_path / "out.md").read_text()
    assert "- device: NVIDIA Test" in text
    assert "| bad | failed |" in text
    assert "no-such-tool is not installed" in text
    assert said[0] == "good: that it works, at most 20 s"
    assert report(chosen[::2], {}, tmp_path / "out", said.append) == 0
    assert markdown({}, []).startswith("# On a GPU")


def test_every_step_is_bounded_and_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    every = steps("python", quick=False)
    names = [step.name for step in every]
    assert len(set(names)) == len(names)
    assert all(0 < step.seconds < 600 for step in every)
    commands = {step.name: " ".join(step.command) for step in every}
    assert commands["gpu-test"] == "make gpu-test PYTHON=python"
    assert "--ways processes --replays 10000 --eager 10000" in commands["processes"]
    assert "--ways streams --replays 100000 --eager 100000" in commands["streams"]
    assert {"memcheck", "initcheck", "synccheck", "pool-float16", "figures", "nccl"} <= set(names)
    assert gpu_report.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    with pytest.raises(SystemExit) as info:
        gpu_report.main(["--only", "memcheck,nonsense"])
    assert info.value.code == 2
    assert "no such step: nonsense" in capsys.readouterr().err


def test_modules_that_steps_name_exist() -> None:
    for step in steps("python", quick=True):
        for word in step.command:
            if word.startswith("benchmarks."):
                assert (ROOT / f"{word.replace('.', '/')}.py").exists(), word
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word


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
