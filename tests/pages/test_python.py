"""Python that pages show in parts runs, given what it takes for granted."""

from __future__ import annotations

import importlib
import os
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
from tests.coordinator.hosts import move_to
from tests.netns import two_hosts
from tests.pages.blocks import block_of
from tests.ranks import run_ranks
from tests.server.over_hosts import PATIENT

if TYPE_CHECKING:
    from tests.netns import Host

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


def given(**more: Any) -> dict[str, Any]:
    return {"Worker": Embedder, "tokens": [1, 2], **more}


def test_what_a_pool_does_when_something_breaks() -> None:
    names = given(WorkerPool=WorkerPool)
    try:
        exec(block_of("docs/failures.md", "pool.call("), names)
        assert names["pool"].call("embed", [3]) == [6.0]
    finally:
        names["pool"].shutdown()


def test_replicas() -> None:
    names = given(Replicas=Replicas)
    try:
        exec(block_of("docs/failures.md", "replicas.call("), names)
        assert names["replicas"].call("embed", [3]) == [6.0]
    finally:
        names["replicas"].shutdown()


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
