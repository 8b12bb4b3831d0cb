"""What docs/decoder.md shows works as it stands there, but for the port."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.http_served import Served
from server.service.completions import PLAIN
from tests.pages.blocks import ROOT, block_of, read
from tests.pages.test_shown_programs import SHOWN_AT, output

if TYPE_CHECKING:
    from pathlib import Path


def test_the_engine(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(block_of("docs/decoder.md", "WorkerPool(DecoderWorker"))
    expected = re.findall(r"print\(.*\)  # (.*)", script.read_text())
    assert len(expected) == 2
    assert output(sys.executable, str(script)).splitlines() == expected


def test_the_fields_that_are_refused() -> None:
    _, _, listed = read("docs/decoder.md").partition("These fields are refused with status 400")
    assert re.findall(r"`(\w+)`", listed.partition("Other fields")[0]) == [*PLAIN]


def test_the_service() -> None:
    command, *options = shlex.split(block_of("docs/decoder.md", "group-coordinator serve"))
    assert (command, options.pop(0)) == ("group-coordinator", "serve")
    with Served(*options) as served:
        served.wait_until_ready()
        curl = block_of("docs/decoder.md", "curl -sN").replace(
            SHOWN_AT, served.url.removeprefix("http://")
        )
        shown = output("bash", "-c", curl)
    events = [line.removeprefix("data: ") for line in shown.splitlines() if line]
    assert events.pop() == "[DONE]"
    said = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(said) == "The capital of France is Paris."


def test_make_chat_is_the_example() -> None:
    assert "make chat" in block_of("docs/decoder.md", "make chat")
    shown = subprocess.run(
        ["make", "-n", "chat"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    assert "examples/decoder/chat.py" in shown
