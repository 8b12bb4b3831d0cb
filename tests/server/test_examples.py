"""The programs in examples/: the demo, two hosts, a launcher."""

from __future__ import annotations

import importlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from coordinator.secret import SECRET_FILE
from server.errors import HostError
from server.hosts.place import Hosts
from server.pool import WorkerPool
from tests.commands import run_to_end
from tests.pages.blocks import ROOT, block_of, without_numbers
from tests.patience import STALL_SECONDS, until
from tests.programs import Program, run_module
from tests.server.served import command
from tests.server.tiny_bert import SENTENCES, make_model
from tests.server.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _fork_servers_end() -> Iterator[None]:
    """Examples import the installed name: other modules, with fork servers of their own."""
    yield
    importlib.import_module("group_coordinator.launchers.fork_servers").FORK_SERVERS.close()


@pytest.fixture(scope="module")
def demo() -> Any:
    return importlib.import_module("examples.demo")


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An example as a module by the name that it has in its folder."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module(name)


def pids_in(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"rank \d+, pid (\d+)", text)]


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_odd_sizes_and_a_line_that_is_too_long(
    demo: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its vectors are kept, and its workers end."""
    model = make_model(tmp_path / "model", layers=3)
    text, out = tmp_path / "text", tmp_path / "embeddings.npy"
    lines = ["", *filter(None, SENTENCES[:3]), "\x1b[31mcat " * 5000]
    text.write_text("\n".join(lines) + "\r\n\n")
    options = [f"--model={model}", f"--input={text}", f"--out={out}"]
    assert demo.main(["--tp=3", "--pp=1", *options]) == 0
    stdout, _ = capfd.readouterr()
    assert "embedded 3 sentences" in stdout
    assert "sentence 3 is longer than 16 tokens: it was cut" in stdout
    assert "?[31mcat" in stdout and "\x1b" not in stdout
    vectors = np.load(out)
    assert (vectors.dtype, vectors.shape) == (np.float32, (3, 24))
    pids = pids_in(stdout)
    assert len(pids) == 3
    until(lambda: ended(pids))


def test_make_demo_prints_what_the_readme_shows(
    demo: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "examples/demo.py\n" in run_to_end("make", "-n", "demo", cwd=ROOT).stdout
    assert demo.main([]) == 0
    stdout, stderr = capfd.readouterr()
    assert stderr == ""
    match = re.search(r"^max_abs_diff=(\S+)$", stdout, re.MULTILINE)
    assert match is not None
    assert float(match[1]) <= 1e-5
    documented = block_of("README.md", "max_abs_diff=").replace("  ...\n", "")
    said, wanted = (without_numbers(each) for each in (stdout, documented))
    assert [line for line in wanted.splitlines() if line not in said] == []


class Host(Program):
    def wait(self) -> int | None:
        self.communicate()
        return self.returncode


def test_two_hosts_answer_as_one_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = imported("two_hosts", monkeypatch)
    monkeypatch.setattr(example, "start", lambda words: Host(command, *words.split()))
    monkeypatch.setenv(SECRET_FILE, "")  # the example sets it
    assert example.main() == 0
    assert "they end with 0 and 0\n" in capfd.readouterr().out


def test_a_wrong_answer_ends_with_status_1(
    demo: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    monkeypatch.setattr(demo, "reference", lambda *_: np.zeros((60, 24), dtype=np.float32))
    assert demo.main(["--tp=1", "--pp=1", f"--model={model}"]) == 1
    assert "\nNOT equal to" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp=5"], "tp=5 does not divide the model's 12 attention heads"),
        (["--model=nowhere"], "nowhere: no such model folder"),
        (["--input=nowhere"], "No such file or directory: 'nowhere'"),
        (["--input=/dev/null"], "/dev/null: holds no text"),
    ],
)
def test_bad_input_ends_with_one_line(
    demo: Any, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments) == 1
    stdout, stderr = capfd.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert stderr.startswith("demo: ") and message in stderr


def test_a_killed_worker_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    model, text = make_model(tmp_path / "model"), tmp_path / "text"
    text.write_text("the cat sat on a blue mat\n" * 100_000)
    options = ("--tp=1", f"--model={model}", f"--input={text}")
    running = Program(run_module, "examples.demo", str(ROOT), *options)
    try:
        pids: list[int] = []
        for line in running.stdout:
            pids += pids_in(line)
            if line.startswith("ready after"):
                break
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        _, stderr = running.communicate(timeout=60 + STALL_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 1
    assert stderr.count("\n") == 1
    assert f"rank 1 (pid {pids[1]})" in stderr
    until(lambda: ended(pids))


# --- a launcher ---------------------------------------------------------------------------------


def test_its_program_adds_up_on_two_hosts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("launcher", monkeypatch).main()
    assert capfd.readouterr().out == "the sum is 40 on 2 hosts\n"


def test_a_command_that_fails_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = imported("launcher", monkeypatch).CommandLauncher(lambda _: ["false"])
    hosts = Hosts(2, 0, "127.0.0.1", 0, b"0123456789abcdef", provisioner=launcher)
    why = "node 1 did not connect: its process has ended with status 1"
    with pytest.raises(HostError, match=why):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=hosts)
