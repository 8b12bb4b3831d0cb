"""The groups of an engine's process: set up, of a pool's worker, of its config, replaced."""

from __future__ import annotations

import os
import sys
import types
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore

import coordinator
from coordinator import host_store
from coordinator.compat.sglang import parallel_state as sglang
from coordinator.compat.vllm import communication_op
from coordinator.compat.vllm import parallel_state as ps
from coordinator.compat.vllm.device_communicators.shm_broadcast import MessageQueue
from coordinator.groups import Topology
from server import WorkerPool
from shm_broadcast import GroupAbortedError, GroupTimeoutError
from tests.forked import in_a_child
from tests.patience import all_here
from tests.ranks import init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- vLLM's functions of a process's one topology -----------------------------------------------


def test_functions_before_and_after_the_set_up() -> None:
    for getter in (ps.get_world_group, ps.get_tp_group, ps.get_ep_group, ps.get_node_count):
        with pytest.raises(RuntimeError, match="not initialised"):
            getter()
    with pytest.raises(RuntimeError, match="not initialised"):
        ps.initialize_model_parallel()
    assert not ps.model_parallel_is_initialized()
    assert not ps.is_initialized()
    assert ps.is_global_first_rank()
    assert ps.is_local_first_rank()
    ps.destroy_model_parallel()
    ps.destroy_distributed_environment()


def first_of_a_users_group(rank: int, n: int, path: str) -> None:
    """Whether this rank is the first of its node, by what a launcher has said."""
    for local_rank, first in ((None, rank == 0), ("0", True), ("1", False)):
        os.environ.update(RANK=str(rank))
        os.environ.pop("LOCAL_RANK", None)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
        assert ps.is_local_first_rank()
        init_gloo(rank, n, path + str(local_rank))
        assert ps.is_local_first_rank() is first
        dist.barrier()
        dist.destroy_process_group()


def test_a_set_up_that_fails_leaves_no_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise GroupTimeoutError("world members", 1.0)

    monkeypatch.setattr(Topology, "group", fail)
    with pytest.raises(GroupTimeoutError):
        ps.init_distributed_environment(1, 0, "tcp://127.0.0.1:1", 0, "gloo")
    assert not dist.is_initialized()


def test_a_default_group_of_another_size_or_rank_is_not_taken() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size, rank in ((2, 0), (1, 1), (2, -1)):
            with pytest.raises(ValueError, match="has 1 ranks, and this is rank 0; the call spec"):
                ps.init_distributed_environment(size, rank)
        ps.init_distributed_environment(1, 0)
        assert ps.get_world_group().world_size == 1
    finally:
        ps.destroy_distributed_environment()
    assert not dist.is_initialized()


def test_the_groups_of_a_world_of_one() -> None:
    for _ in range(2):
        ps.init_distributed_environment(1, 0, "tcp://127.0.0.1:1", 0, "gloo")
        ps.init_distributed_environment(1, 0)
        with pytest.raises(ValueError, match="the world has 1 ranks, not 2"):
            ps.init_distributed_environment(2, 0)
        assert ps.is_initialized()
        assert dist.is_initialized()
        ps.ensure_model_parallel_initialized(1, 1)
        ps.ensure_model_parallel_initialized(1, 1)
        with pytest.raises(ValueError, match="the groups have the sizes"):
            ps.ensure_model_parallel_initialized(2, 1)
        with pytest.raises(RuntimeError, match="initialised already"):
            ps.initialize_model_parallel()
        group, x = ps.get_pp_group(), torch.ones(2)
        for verb in (group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast):
            assert verb(x) is x
        sent = {"x": x}
        assert group.gather(x) is x and group.send_tensor_dict(sent) is sent
        assert group.broadcast_tensor_dict(sent) is sent
        assert group.isend_tensor_dict(sent) == []
        assert (group.recv_tensor_dict(), group.irecv_tensor_dict()) == (None, (None, [], []))
        assert (dist.get_world_size(group.cpu_group), group.device_group.size()) == (1, 1)
        assert ps.get_inner_dp_world_group() is ps.get_world_group()
        with ps.graph_capture(torch.device("cpu")) as context:
            assert context.stream is None
        with pytest.raises(RuntimeError, match="'eplb' is not initialised"):
            ps.get_eplb_group()
        ps.cleanup_dist_env_and_memory()
        ps.cleanup_dist_env_and_memory()
        assert not ps.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("method", "message"),
    [("tcp://h:1", "needs rank and world_size"), ("smoke://", "must be env://, tcp:// or file://")],
)
def test_wrong_methods_are_refused(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.init_distributed_environment(2, -1 if "tcp" in method else 0, method)


def life_of_a_worker(rank: int, n: int, path: str) -> None:
    for turn in range(2):
        ps.init_distributed_environment(n, rank, f"file://{path}{turn}", rank, "nccl")
        assert dist.get_backend() == "gloo"
        ps.initialize_model_parallel(2, 2, enable_eplb=True)
        tp, pp = ps.get_tp_group(), ps.get_pp_group()
        assert ps.get_world_group().ranks == [0, 1, 2, 3]
        assert tp.ranks == ([0, 1] if rank < 2 else [2, 3])
        assert pp.ranks == [rank % 2, rank % 2 + 2]
        assert ps.get_dp_group().ranks == ps.get_pcp_group().ranks == [rank]
        assert ps.get_ep_group().ranks == ps.get_eplb_group().ranks == tp.ranks
        assert ps.get_eplb_group() is not ps.get_ep_group()
        assert ps.get_tensor_model_parallel_world_size() == 2
        assert ps.get_tensor_model_parallel_rank() == rank % 2
        assert ps.get_pipeline_model_parallel_rank() == rank // 2
        assert ps.get_node_count() == 1
        assert ps.is_global_first_rank() == ps.is_local_first_rank() == (rank == 0)
        assert ps.in_the_same_node_as(ps.get_world_group().cpu_group, 2) == [True] * 4
        assert tp.mq_broadcaster is not None
        assert tp.broadcast_object(["from", rank % 2] if rank % 2 == 0 else None) == ["from", 0]
        assert tp.all_reduce(torch.ones(2)).tolist() == [2, 2]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 4
        sorted_group = ps.new_group([3, 1])
        if rank in (1, 3):
            assert sorted_group is not None
            assert sorted_group.ranks == [1, 3]
            assert sorted_group.all_gather(torch.tensor([rank])).tolist() == [1, 3]
            sorted_group.destroy()
        else:
            assert sorted_group is None
        if rank == 1:
            for stranger in (9, -1):
                with pytest.raises(ValueError, match="world of 4"):
                    ps.new_group([1, stranger])
                with pytest.raises(ValueError, match="world of 4"):
                    ps.init_model_parallel_group([[1, stranger]], rank, "gloo")
        own = ps.init_model_parallel_group([[0, 3], [2, 1]], rank, "gloo", group_name="own")
        assert own.all_gather(torch.tensor([rank])).tolist() == own.ranks
        sibling = own.make_sibling_device_group("beside")
        dist.all_reduce(total, group=sibling)
        assert total.item() == 8
        ps.get_world_group().barrier()
        own.destroy()
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(4)
        assert ps.get_tp_group().all_reduce(torch.ones(1)).item() == 4
        ps.get_world_group().barrier()
        ps.cleanup_dist_env_and_memory()


def external_replicas(rank: int, n: int, path: str) -> None:
    """Two replicas that know nothing of each other, over a default group that is there."""
    init_gloo(rank, n, path)
    ps.init_distributed_environment(local_rank=rank)
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    assert ps.get_dp_group().ranks == [rank]
    assert ps.get_inner_dp_world_group().ranks == ps.get_tp_group().ranks
    ps.get_world_group().barrier()
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2, data_parallel_size=2)
    assert ps.get_dp_group().ranks == [rank % 2, rank % 2 + 2]
    assert ps.get_ep_group().ranks == [0, 1, 2, 3]
    assert ps.get_ep_group().token_group is ps.get_dp_group()
    assert ps.get_inner_dp_world_group().ranks == ps.get_tp_group().ranks
    ps.destroy_model_parallel()
    with pytest.raises(ValueError, match="ranks, not 4"):
        ps.initialize_model_parallel(3)
    ps.get_world_group().barrier()
    ps.cleanup_dist_env_and_memory()


def by_environment(rank: int, n: int, port: int) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": "0", **where}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ps.init_distributed_environment()
    assert ps.get_world_group().rank == rank
    assert ps.is_local_first_rank()
    ps.get_world_group().barrier()
    ps.destroy_distributed_environment()


def test_groups_by_the_environment() -> None:
    store = host_store()
    run_ranks(2, by_environment, store.port)


def one_is_missing(rank: int, n: int, path: str) -> None:
    if rank == 1:
        return
    all_here(dist.FileStore(f"{path}-beside", n), n - 1)
    with pytest.raises(GroupTimeoutError) as caught:
        ps.init_distributed_environment(
            n, rank, f"file://{path}", backend="gloo", timeout=timedelta(seconds=4)
        )
    assert [member.rank for member in caught.value.waiting_for] == [1]
    assert not dist.is_initialized()


def end_in_a_child(rank: int, n: int, path: str) -> None:
    ps.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    ps.initialize_model_parallel(n)
    if rank == 0:
        in_a_child(ps.cleanup_dist_env_and_memory)
    assert ps.get_tp_group().all_reduce(torch.ones(1)).item() == n
    default = torch.ones(1)
    dist.all_reduce(default)
    assert default.item() == n
    ps.cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("n", "body"),
    [
        *((4, life_of_a_worker), (4, external_replicas), (3, one_is_missing), (2, end_in_a_child)),
        (2, first_of_a_users_group),
    ],
)
def test_the_groups_of_real_ranks(n: int, body: Callable[..., None], store_path: str) -> None:
    run_ranks(n, body, store_path)


# --- in a pool's worker -------------------------------------------------------------------


class EngineWorker:
    """Uses only the getters of the engines."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def current(self) -> bool:
        return coordinator.current() is self.context.groups

    def vllm(self, x: float) -> dict[str, Any]:
        tp, pp = ps.get_tp_group(), ps.get_pp_group()
        ps.init_distributed_environment(4)
        ps.ensure_model_parallel_initialized(2, 2)
        return {
            "ranks": (tp.ranks, pp.ranks, ps.get_world_group().ranks),
            "sum": communication_op.tensor_model_parallel_all_reduce(torch.tensor([x])).tolist(),
            "dict": communication_op.broadcast_tensor_dict({"x": x} if tp.is_first_rank else None),
            "rank": ps.get_tensor_model_parallel_rank(),
            "again": ps.get_tp_group() is tp,
            "replica": ps.get_inner_dp_world_group().world_size,
            "initialized": (ps.is_initialized(), ps.model_parallel_is_initialized()),
        }

    def sglang(self, x: float) -> dict[str, Any]:
        return {
            "sum": sglang.get_attn_tp_group().all_reduce(torch.tensor([x])).tolist(),
            "sizes": (sglang.get_attn_tensor_model_parallel_world_size(), sglang.get_world_size()),
            "ranks": (sglang.get_moe_tensor_parallel_rank(), sglang.get_world_rank()),
        }

    def build_again(self) -> None:
        with pytest.raises(RuntimeError, match="initialised already"):
            ps.initialize_model_parallel(2, 2)


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
            assert ps.get_tp_group().ranks == [0]
        assert coordinator.current() is outer
    with pytest.raises(RuntimeError):
        coordinator.current()
    with pytest.raises(AssertionError):
        ps.get_tp_group()


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
    ps.init_distributed_environment(2, tp_rank, "tcp://127.0.0.1:1", tp_rank, "gloo")
    ps.initialize_model_parallel(2)
    total = ps.get_dp_group().all_reduce(torch.tensor([1.0 + rank])).item()
    found = ps.get_world_group().ranks, ps.get_dp_group().ranks, total
    ps.destroy_model_parallel()
    ps.destroy_distributed_environment()
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
        ps.init_distributed_environment(1, 0)


# --- names --------------------------------------------------------------------------------


def test_a_mock_of_the_class_has_the_ranks() -> None:
    mock = Mock(spec=ps.GroupCoordinator)
    for name in (
        *("rank", "ranks", "rank_in_group", "world_size", "local_rank", "device", "unique_name"),
        *("name", "cpu_group", "device_group", "mq_broadcaster"),
    ):
        getattr(mock, name)
    with pytest.raises(AttributeError):
        mock.no_such_name  # noqa: B018


class OwnGroups(ps.GroupCoordinator):
    """Sets its attributes itself, as xDiT's groups do."""

    def __init__(self, ranks: list[int]) -> None:
        self.rank = dist.get_rank()
        self.ranks = ranks
        self.rank_in_group = ranks.index(self.rank)
        self.world_size = len(ranks)
        self.device_group = self.cpu_group = dist.new_group(ranks, backend="gloo")
        self.device = torch.device("cpu")


def subclassed(rank: int, n: int, path: str) -> None:
    ps.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    own = OwnGroups([0, 1])
    assert (own.next_rank, own.is_last_rank) == (1 - rank, rank == 1)
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x, group=own.device_group)
    assert x.item() == 3.0
    group = ps.init_model_parallel_group([[0, 1]], rank, "gloo", use_all2all=True)
    other = group.cpu_group
    group.cpu_group = own.cpu_group
    assert group.cpu_group is own.cpu_group is not other
    y = torch.tensor([float(rank + 1), 5.0])
    assert group._all_reduce_out_place(y).tolist() == [3.0, 10.0]
    assert group._all_gather_out_place(y, 0).tolist() == [1.0, 5.0, 2.0, 5.0]
    assert group._reduce_scatter_out_place(y, 0).tolist() == [[3.0], [10.0]][rank]
    group.destroy()
    ps.destroy_distributed_environment()


def late(rank: int, n: int, path: str) -> None:
    ps.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    if rank == 1:
        with pytest.raises(GroupAbortedError):  # by the rank that timed out
            ps.get_world_group().recv_object(0)
        return
    with pytest.raises(GroupTimeoutError, match=r"^Timed out"):
        ps.get_world_group().cpu_all_reduce_(torch.ones(1), timeout=0.2)


def reduce_by_torchs_names(rank: int, n: int, path: str) -> None:
    with coordinator.init(tp=n, rank=rank, store=FileStore(path, n)) as groups:
        x = torch.tensor([float(rank + 1), 4.0])
        with pytest.raises(TypeError, match="PREMUL_SUM"):
            groups.tp.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM)
        assert groups.tp.all_reduce(x, op=dist.ReduceOp.MAX).tolist() == [2.0, 4.0]
        assert groups.tp.all_reduce(x, op=dist.ReduceOp.AVG).tolist() == [1.5, 4.0]
        product = groups.tp.reduce_scatter(x, 0, op=dist.ReduceOp.PRODUCT)
        assert product.tolist() == [[2.0], [16.0]][rank]
        assert (groups.tp.reduce(x, 0, op=dist.ReduceOp.MIN) is None) is (rank == 1)


@pytest.mark.parametrize("body", [subclassed, late, reduce_by_torchs_names])
def test_names_do_on_real_ranks_what_engines_use_them_for(
    body: Callable[..., None], store_path: str
) -> None:
    run_ranks(2, body, store_path)


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
