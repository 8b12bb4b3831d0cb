"""Code blocks of README.md, and of pages on groups, queues, serving, run as they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.http_served import Served
from tests.pages.blocks import ROOT, block_of, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHOWN_AT = "127.0.0.1:8000"


def output(*command: str) -> str:
    # Unbuffered, the pieces of a line that two processes print get between each other.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    ).stdout


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """What the first line of the block starts."""
    command, _, _ = block_of("docs/serving.md", "group-coordinator serve").partition("\n")
    options = shlex.split(command)
    assert options[:2] == [".venv/bin/group-coordinator", "serve"]
    at = options.index("--port")
    assert f"127.0.0.1:{options[at + 1]}" == SHOWN_AT
    with Served(*options[2:at], *options[at + 2 :]) as served:
        served.wait_until_ready()
        yield served


def at_its_port(code: str, served: Served) -> str:
    assert SHOWN_AT in code
    return code.replace(SHOWN_AT, served.url.removeprefix("http://"))


def test_the_curl_line(served: Served) -> None:
    _, _, curl = block_of("docs/serving.md", "group-coordinator serve").partition("\n")
    answer = json.loads(output("bash", "-c", at_its_port(curl, served)))
    assert [len(entry["embedding"]) for entry in answer["data"]] == [384, 384]


def test_the_official_client(served: Served) -> None:
    code = block_of("docs/serving.md", "from openai import")
    (expected,) = re.findall(r"# (\[.*\])", code)
    assert output(sys.executable, "-c", at_its_port(code, served)).strip() == expected


@pytest.mark.parametrize("beside", ["", "server.py"])
def test_the_pool(beside: str, tmp_path: Path) -> None:
    if beside:
        (tmp_path / beside).write_text("raise RuntimeError('a module of the user')\n")
    script = tmp_path / "readme.py"
    script.write_text(block_of("README.md", "with WorkerPool("))
    first, second, third = output(sys.executable, str(script)).splitlines()
    assert first == "tensor([30., 30., 30.])"
    assert second == "[tensor([30.]), tensor([30., 30.])]"
    assert third == "[30.0, 31.0, 32.0]"


def test_groups_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(block_of("README.md", "with coordinator.init(tp=2)"))
    options = ("--standalone", "--nproc-per-node", "2")
    assert " ".join(options) in read("README.md")
    shown = output(sys.executable, "-m", "torch.distributed.run", *options, str(script))
    assert shown.count("tensor([1., 1., 1., 1.])") == 2


@pytest.mark.parametrize(("name", "n"), [("verbs.py", 2), ("own_groups.py", 2), ("experts.py", 4)])
def test_the_groups(name: str, n: int, tmp_path: Path) -> None:
    script = tmp_path / name
    blocks = {
        "verbs.py": block_of("docs/groups.md", "# verbs.py"),
        "own_groups.py": block_of("docs/groups.md", "# own_groups.py"),
        "experts.py": block_of("docs/groups.md", "# experts.py"),
    }
    script.write_text(blocks[name])
    options = ("--standalone", "--nproc-per-node", str(n))
    assert f"torchrun {' '.join(options)} {name}" in read("docs/groups.md")
    output(sys.executable, "-m", "torch.distributed.run", *options, str(script))


def test_the_queue(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(block_of("docs/queues.md", "MessageQueue(n_reader=2"))
    message = {"step": 1, "tokens": [1, 2, 3]}
    found = sorted(output(sys.executable, str(script)).splitlines())
    assert found == [f"{rank} {message}" for rank in (0, 1)]
