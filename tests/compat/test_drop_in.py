"""An engine's own accessors in a pool's worker, its config, and subclasses of its groups."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore

import coordinator
from coordinator.compat.sglang import parallel_state as sglang
from coordinator.compat.vllm import communication_op
from coordinator.compat.vllm import parallel_state as vllm
from coordinator.compat.vllm.device_communicators.shm_broadcast import MessageQueue
from coordinator.compat.vllm.utils import StatelessProcessGroup
from server import WorkerPool
from shm_broadcast import GroupAbortedError, GroupTimeoutError
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

# --- in a pool's worker -------------------------------------------------------------------


class EngineWorker:
    """Uses only the getters of the engines."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def current(self) -> bool:
        return coordinator.current() is self.context.groups

    def vllm(self, x: float) -> dict[str, Any]:
        tp, pp = vllm.get_tp_group(), vllm.get_pp_group()
        vllm.init_distributed_environment(4)
        vllm.ensure_model_parallel_initialized(2, 2)
        return {
            "ranks": (tp.ranks, pp.ranks, vllm.get_world_group().ranks),
            "sum": communication_op.tensor_model_parallel_all_reduce(torch.tensor([x])).tolist(),
            "dict": communication_op.broadcast_tensor_dict({"x": x} if tp.is_first_rank else None),
            "rank": vllm.get_tensor_model_parallel_rank(),
            "again": vllm.get_tp_group() is tp,
            "replica": vllm.get_inner_dp_world_group().world_size,
            "initialized": (vllm.is_initialized(), vllm.model_parallel_is_initialized()),
        }

    def sglang(self, x: float) -> dict[str, Any]:
        return {
            "sum": sglang.get_attn_tp_group().all_reduce(torch.tensor([x])).tolist(),
            "sizes": (sglang.get_attn_tensor_model_parallel_world_size(), sglang.get_world_size()),
            "ranks": (sglang.get_moe_tensor_parallel_rank(), sglang.get_world_rank()),
        }

    def build_again(self) -> str:
        with pytest.raises(RuntimeError, match="initialised already") as caught:
            vllm.initialize_model_parallel(2, 2)
        return str(caught.value)


def test_the_getters_of_an_engine_give_the_groups_of_a_pools_worker() -> None:
    with WorkerPool(EngineWorker, tp=2, pp=2) as pool:
        assert pool.collective_rpc("current") == [True] * 4
        for rank, found in enumerate(pool.collective_rpc("vllm", args=(1.5,))):
            stage = [rank // 2 * 2, rank // 2 * 2 + 1]
            assert found["ranks"] == (stage, [rank % 2, rank % 2 + 2], [0, 1, 2, 3])
            assert (found["sum"], found["dict"]) == ([3.0], {"x": 1.5})
            assert (found["rank"], found["again"], found["replica"]) == (rank % 2, True, 4)
            assert found["initialized"] == (True, True)
        for rank, found in enumerate(pool.collective_rpc("sglang", args=(2.0,))):
            assert found == {"sum": [4.0], "sizes": (2, 4), "ranks": (rank % 2, rank)}
        pool.collective_rpc("build_again")


def test_without_groups_the_native_accessor_raises() -> None:
    with pytest.raises(RuntimeError, match=r"call coordinator\.init"):
        coordinator.current()
    with coordinator.init(dp=1) as outer:
        with coordinator.init(dp=1) as inner:
            assert coordinator.current() is inner
            assert vllm.get_tp_group().ranks == [0]
        assert coordinator.current() is outer
    with pytest.raises(RuntimeError):
        coordinator.current()
    with pytest.raises(AssertionError):
        vllm.get_tp_group()


# --- vLLM's config ------------------------------------------------------------------------


def give_config(**parallel: Any) -> None:
    """Set what ``vllm.config`` returns in this process."""
    defaults = {
        "enable_elastic_ep": False,
        "enable_eplb": False,
        "distributed_executor_backend": "mp",
        "nnodes": 1,
        "data_parallel_size": 1,
        "_coord_store_port": 0,
    }
    module: Any = types.ModuleType("vllm.config")
    config = SimpleNamespace(parallel_config=SimpleNamespace(**(defaults | parallel)))
    module.get_current_vllm_config_or_none = lambda: config
    sys.modules["vllm.config"] = module


def two_engines(rank: int, n: int, port: int, how: str) -> tuple[list[int], list[int], float]:
    """Start as an engine of two tensor-parallel ranks does; its config says there are two."""
    replica, tp_rank = divmod(rank, 2)
    config: dict[str, Any] = {
        "data_parallel_size": 2,
        "data_parallel_rank": replica,
        "world_size_across_dp": n,
        "data_parallel_master_ip": "127.0.0.1",
        "master_addr": "127.0.0.1",
        "master_port": port,
        "get_next_dp_init_port": lambda: port,
    }
    config |= {"nnodes": 2} if how == "nodes" else {}
    config |= {"_coord_store_port": port} if how == "store" else {}
    give_config(**config)
    vllm.init_distributed_environment(2, tp_rank, "tcp://127.0.0.1:1", tp_rank, "gloo")
    vllm.initialize_model_parallel(2)
    total = vllm.get_dp_group().all_reduce(torch.tensor([1.0 + rank])).item()
    found = vllm.get_world_group().ranks, vllm.get_dp_group().ranks, total
    vllm.destroy_model_parallel()
    vllm.destroy_distributed_environment()
    return found


@pytest.mark.parametrize("how", ["port", "nodes", "store"])
def test_the_world_spans_the_engines_of_vllms_config(how: str) -> None:
    coordination = TCPStore("127.0.0.1", 0, None, True)
    port = coordination.port
    if how != "store":  # rank 0 hosts a store at this port
        del coordination
    found = run_ranks(4, two_engines, port, how)
    world = [0, 1, 2, 3]
    assert found == [(world, [r % 2, r % 2 + 2], 2.0 * (r % 2) + 4.0) for r in range(4)]


def test_an_elastic_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", sys)  # restored at the end
    give_config(enable_elastic_ep=True)
    with pytest.raises(ValueError, match=r"resized\(\)"):
        vllm.init_distributed_environment(1, 0)


# --- names --------------------------------------------------------------------------------


def test_a_mock_of_the_class_has_the_ranks() -> None:
    mock = Mock(spec=vllm.GroupCoordinator)
    for name in (
        *("rank", "ranks", "rank_in_group", "world_size", "local_rank", "device", "unique_name"),
        *("name", "cpu_group", "device_group", "mq_broadcaster"),
    ):
        getattr(mock, name)
    with pytest.raises(AttributeError):
        mock.no_such_name  # noqa: B018


class OwnGroups(vllm.GroupCoordinator):
    """Sets its attributes itself, as xDiT's groups do."""

    def __init__(self, ranks: list[int]) -> None:
        self.rank = dist.get_rank()
        self.ranks = ranks
        self.rank_in_group = ranks.index(self.rank)
        self.world_size = len(ranks)
        self.device_group = self.cpu_group = dist.new_group(ranks, backend="gloo")
        self.device = torch.device("cpu")


def subclassed(rank: int, n: int, path: str) -> tuple[Any, ...]:
    vllm.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    own = OwnGroups([0, 1])
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x, group=own.device_group)
    group = vllm.init_model_parallel_group([[0, 1]], rank, "gloo", use_all2all=True)
    other = group.cpu_group
    group.cpu_group = own.cpu_group
    replaced = group.cpu_group is own.cpu_group is not other
    y = torch.tensor([float(rank + 1), 5.0])
    found = (
        own.next_rank,
        own.is_last_rank,
        x.item(),
        replaced,
        group._all_reduce_out_place(y).tolist(),
        group._all_gather_out_place(y, 0).tolist(),
        group._reduce_scatter_out_place(y, 0).tolist(),
    )
    group.destroy()
    vllm.destroy_distributed_environment()
    return found


def test_a_subclass_sets_its_own_groups_and_ranks(store_path: str) -> None:
    gathered = [1.0, 5.0, 2.0, 5.0]
    assert run_ranks(2, subclassed, store_path) == [
        (1, False, 3.0, True, [3.0, 10.0], gathered, [3.0]),
        (0, True, 3.0, True, [3.0, 10.0], gathered, [10.0]),
    ]


def late(rank: int, n: int, path: str) -> str:
    vllm.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    if rank == 1:
        with pytest.raises(GroupAbortedError):  # by the rank that timed out
            vllm.get_world_group().recv_object(0)
        return ""
    with pytest.raises(GroupTimeoutError) as caught:
        vllm.get_world_group().cpu_all_reduce_(torch.ones(1), timeout=0.2)
    return str(caught.value)


def test_a_late_reduction_on_the_cpu_says_timed_out(store_path: str) -> None:
    text = run_ranks(2, late, store_path)[0]
    assert text.startswith("Timed out")


def over_a_store(rank: int, n: int, path: str) -> list[Any]:
    with StatelessProcessGroup(rank=rank, world_size=n, store=FileStore(path, n)) as group:
        return group.all_gather_obj({"rank": group.rank})


def test_a_stateless_group_meets_in_a_given_store(store_path: str) -> None:
    assert run_ranks(2, over_a_store, store_path) == [[{"rank": 0}, {"rank": 1}]] * 2


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_queue_with_readers_elsewhere_finds_its_address(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address is None:
        monkeypatch.delenv("VLLM_HOST_IP", raising=False)
        module = "coordinator.compat.vllm.device_communicators.shm_broadcast"
        monkeypatch.setattr(f"{module}.own_address", lambda *_: "127.0.0.2")
    else:
        monkeypatch.setenv("VLLM_HOST_IP", address)
    queue = MessageQueue(1, 0, secret=b"s" * 32)
    expected = address or "127.0.0.2"
    assert f"//{expected}:" in str(queue.export_handle().remote_subscribe_addr)
    queue.shutdown()


def reduce_by_torchs_names(rank: int, n: int, path: str) -> list[Any]:
    with coordinator.init(tp=n, rank=rank, store=FileStore(path, n)) as groups:
        x = torch.tensor([float(rank + 1), 4.0])
        return [
            groups.tp.all_reduce(x, op=dist.ReduceOp.MAX).tolist(),
            groups.tp.all_reduce(x, op=dist.ReduceOp.AVG).tolist(),
            groups.tp.reduce_scatter(x, 0, op=dist.ReduceOp.PRODUCT).tolist(),
            (groups.tp.reduce(x, 0, op=dist.ReduceOp.MIN) is None),
        ]


def test_verbs_take_torchs_reductions_by_name(store_path: str) -> None:
    first, second = run_ranks(2, reduce_by_torchs_names, store_path)
    assert first == [[2.0, 4.0], [1.5, 4.0], [2.0], False]
    assert second == [[2.0, 4.0], [1.5, 4.0], [16.0], True]


def test_torchs_reductions_that_are_not_ours_are_refused() -> None:
    with coordinator.init(dp=1) as groups, pytest.raises(TypeError, match="PREMUL_SUM"):
        groups.tp.all_reduce(torch.ones(2), op=dist.ReduceOp.PREMUL_SUM)


def test_vllms_getters_return_sglangs_groups_while_patched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module: Any = types.ModuleType("vllm.distributed.parallel_state")
    own = {name: Mock() for name in ("get_world_group", "get_tp_group", "get_pp_group")}
    vars(module).update(own)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", module)
    sglang.monkey_patch_vllm_parallel_state()
    sglang.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
    try:
        assert module.get_world_group().ranks == [0]
    finally:
        sglang.destroy_distributed_environment()
        sglang.monkey_patch_vllm_parallel_state(reverse=True)
        sglang._vllm_getters.clear()
    assert {name: getattr(module, name) for name in own} == own
