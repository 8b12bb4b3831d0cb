"""vLLM's functions of a process's one topology."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from coordinator import host_store
from coordinator.compat.vllm import parallel_state as ps
from coordinator.groups import Topology
from shm_broadcast import GroupTimeoutError
from tests.forked import in_a_child
from tests.patience import all_here
from tests.ranks import init_gloo, run_ranks


def test_before_and_after() -> None:
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


def first_of_a_users_group(rank: int, n: int, path: str) -> list[bool]:
    """Whether this rank is the first of its node, by what a launcher has said."""
    told: list[bool] = []
    for local_rank in (None, "0", "1"):
        os.environ.update(RANK=str(rank))
        os.environ.pop("LOCAL_RANK", None)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
        assert ps.is_local_first_rank()
        init_gloo(rank, n, path + str(local_rank))
        told.append(ps.is_local_first_rank())
        dist.barrier()
        dist.destroy_process_group()
    return told


def test_the_first_rank_of_a_node_with_a_users_own_group(store_path: str) -> None:
    first, second = run_ranks(2, first_of_a_users_group, store_path)
    assert (first, second) == ([True, True, False], [False, True, False])


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


def test_alone() -> None:
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
        x = torch.ones(1)
        assert ps.get_tp_group().all_reduce(x) is x
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
def test_wrong_methods(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.init_distributed_environment(2, -1 if "tcp" in method else 0, method)


def by_file(rank: int, n: int, path: str) -> None:
    """The life of a vLLM worker, twice."""
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


def test_a_workers_life(store_path: str) -> None:
    run_ranks(4, by_file, store_path)


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


def test_replicas(store_path: str) -> None:
    run_ranks(4, external_replicas, store_path)


def by_environment(rank: int, n: int, port: int) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": "0", **where}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ps.init_distributed_environment()
    assert ps.get_world_group().rank == rank
    assert ps.is_local_first_rank()
    ps.get_world_group().barrier()
    ps.destroy_distributed_environment()


def test_environment() -> None:
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


def test_a_missing_rank_is_named(store_path: str) -> None:
    run_ranks(3, one_is_missing, store_path)


def end_in_a_child(rank: int, n: int, path: str) -> float:
    ps.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    ps.initialize_model_parallel(n)
    if rank == 0:
        in_a_child(ps.cleanup_dist_env_and_memory)
    total: float = ps.get_tp_group().all_reduce(torch.ones(1)).item()
    default = torch.ones(1)
    dist.all_reduce(default)
    assert default.item() == n
    ps.cleanup_dist_env_and_memory()
    return total


def test_a_child_that_ends_what_its_parent_has_joined_ends_nothing(store_path: str) -> None:
    assert run_ranks(2, end_in_a_child, store_path) == [2.0, 2.0]
