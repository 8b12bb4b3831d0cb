"""The page of an engine: the first process tells why it ended, and others see the boards."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from coordinator.plugins.vllm import page
from coordinator.plugins.vllm.__main__ import report
from shm_broadcast import Board

ENGINE = """
import subprocess, sys
from coordinator.plugins.vllm import page
page.keep(); page.keep()
worker = "from coordinator.plugins.vllm import page; page.keep(); page.tell(end=%r)"
for words in ("worker rank 1 (pid 7) was killed by SIGKILL", "and so on"):
    subprocess.run([sys.executable, "-c", worker % words], check=True)
print("vLLM's own last line")
"""

WAITING = """
import subprocess, sys
from coordinator.plugins.vllm import page
page.keep()
worker = '''
from coordinator.plugins.vllm import page
from shm_broadcast import Board
board = Board.create(2, 0, "", (0, 1))
page.tell(group="tp", board=board.handle())
print("told", flush=True)
input()
'''
subprocess.run([sys.executable, "-c", worker], check=True)
"""


def test_the_first_reason_is_the_last_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "vLLM's own last line",
        "vLLM's engine has ended: worker rank 1 (pid 7) was killed by SIGKILL",
    ]


def test_boards_are_read_from_outside() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "told\n"
        ((_, handle),) = page.boards(engine.pid)
        with pytest.raises(ValueError, match="taken by pid"):
            Board.attach(handle, 0)
        first, zero, one = report(engine.pid).splitlines()
        assert first == "tp"
        assert zero.startswith("  rank 0 (pid ")
        assert one == "  rank 1 (never joined)"
        engine.communicate("\n", timeout=30)


def test_other_processes_are_told_apart() -> None:
    with pytest.raises(LookupError, match="no process of an engine"):
        page.boards(os.getpid())
    asked = subprocess.run(
        [sys.executable, "-m", "coordinator.plugins.vllm", "x"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 1
    assert asked.stderr.startswith("usage: ")


def test_without_a_page_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(page.VARIABLE, raising=False)
    page.tell(end="nobody hears it")
    monkeypatch.setenv(page.VARIABLE, f"/proc/1/fd/{time.monotonic_ns()}")
    page.tell(end="nobody hears it")
