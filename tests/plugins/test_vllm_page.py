"""The page of an engine: the first process tells why it ended."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from coordinator.plugins.vllm import hooks

if TYPE_CHECKING:
    import pytest

ENGINE = """
import subprocess, sys
from coordinator.plugins.vllm import hooks
hooks.keep_page(); hooks.keep_page()
worker = "from coordinator.plugins.vllm import hooks; hooks.keep_page(); hooks.report_end(end=%r)"
for words in ("worker rank 1 (pid 7) was killed by SIGKILL", "and so on"):
    subprocess.run([sys.executable, "-c", worker % words], check=True)
print("vLLM's own last line")
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


def test_without_a_page_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.PAGE_VARIABLE, raising=False)
    hooks.report_end(end="nobody hears it")
    monkeypatch.setenv(hooks.PAGE_VARIABLE, f"/proc/1/fd/{time.monotonic_ns()}")
    hooks.report_end(end="nobody hears it")
