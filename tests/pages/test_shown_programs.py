"""Programs that pages show, run as they are there."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import FileStore

import coordinator
import coordinator.compat.sglang
import coordinator.compat.vllm
import coordinator.layout
from benchmarks.http_served import Served
from coordinator.layout import Layout, Replicate, Shard
from coordinator.secret import SECRET_FILE
from server.pool import WorkerPool
from server.replicas import Replicas
from tests.commands import run_to_end
from tests.coordinator.hosts import move_to
from tests.netns import two_hosts
from tests.pages.blocks import block_of, read
from tests.ranks import run_ranks
from tests.server.over_hosts import PATIENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.netns import Host


# --- whole programs -----------------------------------------------------------------------------


SHOWN_AT = "127.0.0.1:8000"


def output(*command: str) -> str:
    # Unbuffered, the pieces of a line that two processes print get between each other.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return run_to_end(*command, env=environment).stdout


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


def test_the_curl_line_of_the_service(served: Served) -> None:
    _, _, curl = block_of("docs/serving.md", "group-coordinator serve").partition("\n")
    answer = json.loads(output("bash", "-c", at_its_port(curl, served)))
    assert [len(entry["embedding"]) for entry in answer["data"]] == [384, 384]


def test_the_official_client_of_the_service(served: Served) -> None:
    code = block_of("docs/serving.md", "from openai import")
    (expected,) = re.findall(r"# (\[.*\])", code)
    assert output(sys.executable, "-c", at_its_port(code, served)).strip() == expected


@pytest.mark.parametrize("beside", ["", "server.py"])
def test_the_pool_of_the_readme(beside: str, tmp_path: Path) -> None:
    if beside:
        (tmp_path / beside).write_text("raise RuntimeError('a module of the user')\n")
    script = tmp_path / "readme.py"
    script.write_text(block_of("README.md", "with WorkerPool("))
    first, second, third = output(sys.executable, str(script)).splitlines()
    assert first == "tensor([30., 30., 30.])"
    assert second == "[tensor([30.]), tensor([30., 30.])]"
    assert third == "[30.0, 31.0, 32.0]"


@pytest.mark.parametrize(
    ("code", "page", "n"),
    [
        (block_of("README.md", "with coordinator.init(tp=2)"), "README.md", 2),
        (block_of("docs/groups.md", "# verbs.py"), "docs/groups.md", 2),
        (block_of("docs/groups.md", "# own_groups.py"), "docs/groups.md", 2),
        (block_of("docs/groups.md", "# experts.py"), "docs/groups.md", 4),
    ],
    ids=["README.md", "verbs.py", "own_groups.py", "experts.py"],
)
def test_groups_under_torchrun(code: str, page: str, n: int, tmp_path: Path) -> None:
    named = re.match(r"# (\w+\.py)", code)
    script = tmp_path / (named[1] if named else "readme.py")
    script.write_text(code)
    options = ("--standalone", "--nproc-per-node", str(n))
    assert f"{' '.join(options)} {script.name if named else ''}".strip() in read(page)
    shown = output(sys.executable, "-m", "torch.distributed.run", *options, str(script))
    assert named or shown.count("tensor([1., 1., 1., 1.])") == 2


def test_the_queue_of_two_readers(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(block_of("docs/queues.md", "MessageQueue(n_reader=2"))
    message = {"step": 1, "tokens": [1, 2, 3]}
    found = sorted(output(sys.executable, str(script)).splitlines())
    assert found == [f"{rank} {message}" for rank in (0, 1)]


def test_the_files_of_tutorial_and_pools(tmp_path: Path) -> None:
    files = {
        "mlp.py": block_of("docs/tutorial.md", "# mlp.py\n"),
        "stages.py": block_of("docs/tutorial.md", "# stages.py\n"),
        "failing.py": block_of("docs/tutorial.md", "# failing.py\n"),
        "cache.py": block_of("docs/tutorial.md", "# cache.py\n"),
        "calls.py": block_of("docs/pools.md", "# calls.py\n"),
        "updates.py": block_of("docs/pools.md", "# updates.py\n"),
        "chain.py": block_of("docs/pools.md", "# chain.py\n"),
    }
    for name, code in files.items():
        (tmp_path / name).write_text(code)
        expected = re.findall(r"print\(.*\)  # (.*)", code)
        assert expected
        assert output(sys.executable, str(tmp_path / name)).splitlines() == expected


# --- parts of programs, with what they take for granted -----------------------------------------


SIZE = 1024
MODEL = """
class Worker:
    def __init__(self, context):
        self.groups = context.groups

    def generate(self, text):
        return f"{text}, {self.groups.world.world_size} ranks"
"""


class Embedder:
    def __init__(self, context: Any) -> None:
        self.tp = context.groups.tp

    def restore(self, context: Any) -> None:
        self.tp = context.groups.tp

    def embed(self, tokens: list[int]) -> list[float]:
        return self.tp.all_reduce(torch.tensor(tokens, dtype=torch.float32)).tolist()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pool", block_of("docs/failures.md", "pool.call(")),
        ("replicas", block_of("docs/failures.md", "replicas.call(")),
    ],
)
def test_pools_and_replicas_that_recover(name: str, code: str) -> None:
    names: dict[str, Any] = {"WorkerPool": WorkerPool, "Replicas": Replicas}
    names |= {"Worker": Embedder, "tokens": [1, 2]}
    try:
        exec(code, names)
        assert names[name].call("embed", [3]) == [6.0]
    finally:
        names[name].shutdown()


def test_imports_in_place_of_an_engines() -> None:
    vllm: dict[str, Any] = {}
    exec(block_of("docs/from-vllm.md", "import get_tp_group"), vllm)
    assert vllm["get_tp_group"] is coordinator.compat.vllm.get_tp_group
    sglang: dict[str, Any] = {}
    exec(block_of("docs/from-sglang.md", "import divide"), sglang)
    assert sglang["divide"](6, 3) == 2


def resharded(rank: int, n: int, folder: str) -> None:
    whole = torch.arange(float(SIZE * SIZE)).reshape(SIZE, SIZE)
    store = FileStore(f"{folder}/store", n)
    with coordinator.init(tp=2, dp=2, rank=rank, store=store) as groups:
        tp, dp = groups.tp.rank_in_group, groups.dp.rank_in_group
        half, quarter = whole.chunk(2)[tp], whole.chunk(4)[rank]
        names: dict[str, Any] = {"groups": groups, "half": half, "quarter": quarter}
        exec(block_of("docs/resharding.md", "y = redistribute(half"), names)
        assert torch.equal(names["y"], whole.chunk(2, 1)[tp])
        assert torch.equal(names["z"], half)

        names["weights"] = {"w": half} if rank < 2 else {}
        names["old_layouts"], names["new_layouts"] = {"w": Shard(0)}, {"w": Shard(1)}
        names["meta_parameters"] = {"w": whole.to("meta")}
        exec(block_of("docs/resharding.md", "moved = reshard("), names)
        assert torch.equal(names["moved"]["w"], whole.chunk(4, 1)[rank])

        names |= vars(coordinator.layout)
        names["source"] = Layout((Shard(0), Shard(0)))
        names["target"] = Layout((Replicate(), Shard(1)))
        exec(block_of("docs/resharding.md", "costs = calibrate_mesh("), names)
        assert torch.equal(names["y"], whole.chunk(2, 1)[tp])

        Path(f"{folder}/{dp}").mkdir(exist_ok=True)
        os.chdir(f"{folder}/{dp}")
        names |= {"weights": {"w": half}, "layouts": {"w": Shard(0)}, "shapes": {"w": whole.shape}}
        names |= {"other_layouts": {"w": Shard(1)}, "other_groups": groups}
        exec(block_of("docs/resharding.md", "save_sharded("), names)
        assert torch.equal(names["weights"]["w"], whole.chunk(2, 1)[tp])


def test_layouts_are_changed_and_kept(tmp_path: Path) -> None:
    run_ranks(4, resharded, str(tmp_path))


def on_a_host(rank: int, n: int, folder: str, hosts: tuple[Host, Host]) -> str | None:
    move_to(folder, hosts, rank)
    os.environ[SECRET_FILE] = f"{folder}/secret"
    os.environ |= {"LWS_GROUP_SIZE": str(n), "LWS_WORKER_INDEX": str(rank)}
    os.environ["LWS_LEADER_ADDRESS"] = hosts[0].address
    sys.path.insert(0, folder)
    said: list[str] = []
    places = importlib.import_module("group_coordinator").Hosts
    patient = replace(places.read(), silence_seconds=PATIENT)
    with patch.object(places, "read", lambda: patient):
        exec(block_of("docs/several-hosts.md", "hosts.is_head"), {"print": said.append})
    return said[0] if said else None


@pytest.mark.namespaces
def test_a_program_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text("known to both hosts, and to no one else")
    with two_hosts("IPv4") as hosts:
        assert run_ranks(2, on_a_host, str(tmp_path), hosts) == ["Hello, 4 ranks", None]
