"""The demo from its console entry: grids, inputs, a killed worker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.cli import main
from server.commands.demo import read_lines
from tests.commands import run_to_end
from tests.pages.blocks import block_of, without_numbers
from tests.patience import STALL_SECONDS
from tests.server.tiny_bert import SENTENCES, make_model

ENTRY = [sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())"]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def gone(pids: list[int], within: float) -> bool:
    deadline = time.monotonic() + within + STALL_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 1)])
def test_grids(tp: int, pp: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "embeddings.npy"
    status = main(["demo", f"--tp={tp}", f"--pp={pp}", "--json", f"--out={out}", "--timeout=90"])
    stdout, stderr = capfd.readouterr()
    assert (status, stderr) == (0, "")
    report = json.loads(stdout)
    assert stdout.count("\n") == 1
    assert report["max_abs_diff"] <= 1e-5
    assert [rank["rank"] for rank in report["ranks"]] == list(range(tp * pp))
    layers = [rank["layers"] for rank in report["ranks"] if rank["tp_rank"] == 0]
    assert [layer for part in layers for layer in range(*part)] == list(range(6))
    vectors = np.load(out)
    assert (vectors.dtype, vectors.shape) == (np.float32, (60, 384))
    assert gone([rank["pid"] for rank in report["ranks"]], within=5)


def test_odd_sizes_and_a_line_that_is_too_long(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", layers=3)
    lines = [*filter(None, SENTENCES[:3]), "cat " * 5000]
    text = write(tmp_path / "text", "\n".join(["", *lines]) + "\r\n\n")
    command = ["demo", "--tp=3", "--pp=1", f"--model={model}", f"--input={text}", "--json"]
    status = main(command)
    stdout, stderr = capfd.readouterr()
    report = json.loads(stdout)
    assert (status, report["ok"], report["sentences"]) == (0, True, 3)
    assert report["truncated"] == [2]
    assert "note: sentence 3 is longer than 16 tokens; the rest was left out\n" in stderr


def test_text_for_people() -> None:
    """Without options: tp=2 and pp=2."""
    done = run_to_end(*ENTRY, "demo")
    assert done.stderr == ""
    assert re.search(r"stage 1, layers 3-5 +rank 2, pid \d+ +rank 3, pid \d+\n", done.stdout)
    assert re.search(r"in \d+\.\d{3} s: \d+\.\d sentences/s\n", done.stdout)
    match = re.search(r"^max_abs_diff=(\S+)$", done.stdout, re.MULTILINE)
    assert match is not None
    assert float(match[1]) <= 1e-5
    documented = block_of("README.md", "max_abs_diff=").replace("  ...\n", "")
    said, wanted = (
        without_numbers(each).replace("threads", "thread") for each in (done.stdout, documented)
    )
    assert [line for line in wanted.splitlines() if line not in said] == []


def test_a_wrong_answer_ends_with_status_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    zeros = np.zeros((60, 24), dtype=np.float32)
    monkeypatch.setattr("server.commands.demo.reference", lambda *_: zeros)
    assert main(["demo", "--tp=1", "--pp=1", f"--model={model}", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp=5"], "tp=5 does not divide the model's 12 attention heads"),
        (["--pp=7"], "pp=7 is more than the model's 6 layers"),
        (["--tp=0"], "tp and pp must be at least 1; got tp=0, pp=2"),
        (["--pp=-3"], "tp and pp must be at least 1; got tp=2, pp=-3"),
        (["--tp=1000", "--pp=1000"], "tp=1000 does not divide"),
        (["--tp=two"], "argument --tp: invalid int value: 'two'"),
        (["--threads=0"], "--threads must be 1 to 8192; got 0"),
        (["--threads=100000000"], "--threads must be 1 to 8192; got 100000000"),
        (["--timeout=-1"], "--timeout must be more than 0 seconds; got -1.0"),
        (["--model=TMP/nowhere"], "TMP/nowhere: no such model folder"),
        (["--model=TMP"], "TMP/modules.json: missing; not a sentence-transformers folder"),
        (["--input=TMP/nowhere"], "TMP/nowhere: No such file or directory"),
        (["--input=TMP"], "TMP: Is a directory"),
        (["--input=TMP/empty"], "TMP/empty: holds no text"),
        (["--input=TMP/blank"], "TMP/blank: holds no text"),
        (["--input=TMP/latin"], "TMP/latin: line 2 is not UTF-8 (byte 0xe9)"),
        (["--out=TMP/no/where.npy"], "--out TMP/no/where.npy: not a file in an existing folder"),
        (["--out=TMP"], "--out TMP: not a file in an existing folder"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "empty", "")
    write(tmp_path / "blank", " \n\r\n\t\n")
    write(tmp_path / "latin", "ascii\ncaf\xe9\n".encode("latin-1"))
    with pytest.raises(SystemExit) as info:
        main(["demo", *(argument.replace("TMP", str(tmp_path)) for argument in arguments)])
    stdout, stderr = capfd.readouterr()
    assert info.value.code == 2
    assert stdout == ""
    assert message.replace("TMP", str(tmp_path)) in stderr
    assert stderr.startswith("group-coordinator demo: error: ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nope"], ["demo", "--bogus"], ["demo", "--dp=2"]])
def test_bad_command_lines(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_lines_are_cut_at_newlines_only(tmp_path: Path) -> None:
    text = write(tmp_path / "text", b"\xef\xbb\xbfone\r\n\n two\xe2\x80\xa8still two\x0c\nthree")
    assert read_lines(text) == ["one", "two\u2028still two", "three"]


def test_a_killed_worker_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    text = write(tmp_path / "text", "A line that is neither long nor short.\n" * 200_000)
    demo: Any = subprocess.Popen(
        [*ENTRY, "demo", "--pp=1", f"--input={text}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids: dict[int, int] = {}
        for line in demo.stdout:
            pids |= {int(r): int(p) for r, p in re.findall(r"rank (\d+), pid (\d+)", line)}
            if line.startswith("ready after"):
                break
        assert sorted(pids) == [0, 1]
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        _, stderr = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 1
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr
    assert f"rank 1 (pid {pids[1]})" in stderr
    assert gone(list(pids.values()), within=5)
