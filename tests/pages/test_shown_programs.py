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
from coordinator.layout import Layout, Replicate, Shard
from coordinator.secret import SECRET_FILE
from server.pool import WorkerPool
from server.replicas import Replicas
from tests.commands import run_to_end
from tests.coordinator.hosts import move_to
from tests.netns import two_hosts
from tests.pages.blocks import block_of, read
from tests.programs import Program, run_script
from tests.ranks import run_ranks
from tests.server.over_hosts import PATIENT
from tests.server.served import ForkedServed
from tests.standing_store import store_elsewhere

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
def served() -> Iterator[ForkedServed]:
    """What the first line of the block starts."""
    command, _, _ = block_of("docs/serving.md", "group-coordinator serve").partition("\n")
    options = shlex.split(command)
    assert options[:2] == [".venv/bin/group-coordinator", "serve"]
    at = options.index("--port")
    assert f"127.0.0.1:{options[at + 1]}" == SHOWN_AT
    with ForkedServed(*options[2:at], *options[at + 2 :]) as served:
        served.wait_until_ready()
        yield served


def at_its_port(code: str, served: ForkedServed) -> str:
    assert SHOWN_AT in code
    return code.replace(SHOWN_AT, served.url.removeprefix("http://"))


def test_the_curl_line_of_the_service(served: ForkedServed) -> None:
    _, _, curl = block_of("docs/serving.md", "group-coordinator serve").partition("\n")
    answer = json.loads(output("bash", "-c", at_its_port(curl, served)))
    assert [len(entry["embedding"]) for entry in answer["data"]] == [384, 384]


def test_the_official_client_of_the_service(served: ForkedServed) -> None:
    code = block_of("docs/serving.md", "from openai import")
    (expected,) = re.findall(r"# (\[.*\])", code)
    assert output(sys.executable, "-c", at_its_port(code, served)).strip() == expected


def test_the_pool_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("raise RuntimeError('a module of the user')\n")
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


def as_under_torchrun(rank: int, n: int, code: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    exec(code, {})


@pytest.mark.parametrize(
    ("code", "name", "n"),
    [
        (block_of("docs/groups.md", "# verbs.py"), "verbs.py", 2),
        (block_of("docs/groups.md", "# own_groups.py"), "own_groups.py", 2),
        (block_of("docs/groups.md", "# experts.py"), "experts.py", 4),
    ],
    ids=lambda given: given if str(given).endswith(".py") else "",
)
def test_groups_of_the_page(code: str, name: str, n: int) -> None:
    assert f"--standalone --nproc-per-node {n} {name}" in read("docs/groups.md")
    with store_elsewhere() as store:
        run_ranks(n, as_under_torchrun, code, store.port)


def test_the_queue_of_two_readers(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(block_of("docs/queues.md", "MessageQueue(n_reader=2"))
    message = {"step": 1, "tokens": [1, 2, 3]}
    found = sorted(output(sys.executable, str(script)).splitlines())
    assert found == [f"{rank} {message}" for rank in (0, 1)]


MLP = block_of("docs/tutorial.md", "# mlp.py\n")


@pytest.mark.parametrize(
    "code",
    [
        MLP,
        block_of("docs/tutorial.md", "# stages.py\n"),
        block_of("docs/tutorial.md", "# failing.py\n"),
        block_of("docs/tutorial.md", "# cache.py\n"),
        block_of("docs/pools.md", "# calls.py\n"),
        block_of("docs/pools.md", "# updates.py\n"),
        block_of("docs/pools.md", "# chain.py\n"),
    ],
    ids=lambda code: code.splitlines()[0],
)
def test_a_file_of_tutorial_or_pools(code: str, tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(MLP)  # others import from it
    script = tmp_path / code.splitlines()[0].removeprefix("# ")
    script.write_text(code)
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert expected
    program = Program(run_script, str(script), os.devnull)
    shown, errors = program.communicate()
    assert (program.returncode, shown.splitlines()) == (0, expected), errors


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
