"""What docs/decoder.md shows works as it stands there, but for the port."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.http_served import Served
from tests.server.test_readme import SHOWN_AT, output

PAGE = Path(__file__).parents[2] / "docs" / "decoder.md"


def block(text: str) -> str:
    """The one code block that contains ``text``."""
    blocks = re.findall(r"```\w*\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (found,) = [code for code in blocks if text in code]
    return str(found)


def test_the_engine(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(block("WorkerPool(DecoderWorker"))
    expected = re.findall(r"print\(.*\)  # (.*)", script.read_text())
    assert len(expected) == 2
    assert output(sys.executable, str(script)).splitlines() == expected


def test_the_service() -> None:
    command, *options = shlex.split(block("group-coordinator serve"))
    assert (command, options.pop(0)) == ("group-coordinator", "serve")
    with Served(*options) as served:
        served.wait_until_ready()
        curl = block("curl -sN").replace(SHOWN_AT, served.url.removeprefix("http://"))
        shown = output("bash", "-c", curl)
    events = [line.removeprefix("data: ") for line in shown.splitlines() if line]
    assert events.pop() == "[DONE]"
    said = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(said) == "The capital of France is Paris."


def test_make_chat_is_the_example() -> None:
    assert "make chat" in block("make chat")
    shown = subprocess.run(
        ["make", "-n", "chat"], cwd=PAGE.parents[1], capture_output=True, check=True, text=True
    ).stdout
    assert "examples/decoder/chat.py" in shown
