"""What SGLang's calls do here, on real ranks; and the values of its helpers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator.compat import sglang
from coordinator.compat.sglang.communication_tags import P2PTag
from coordinator.compat.sglang.device_communicators.shm_broadcast import MessageQueue
from coordinator.compat.sglang.parallel_state import ParallelSizes
from tests.ranks import init_gloo, run_ranks

# --- helpers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "starts"),
    [
        (8, 4, [0, 2, 4, 6]),
        (9, 4, [0, 2, 4, 6]),
        (11, 4, [0, 2, 5, 8]),
        (5, 1, [0]),
        (1, 2, [0, 0]),
    ],
)
def test_layers_of_stages(
    layers: int, stages: int, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left over goes to the last stages: not vLLM's rule."""
    monkeypatch.delenv("SGLANG_PP_LAYER_PARTITION", raising=False)
    ends = [*starts[1:], layers]
    found = [sglang.get_pp_indices(layers, rank, stages) for rank in range(stages)]
    assert found == list(zip(starts, ends, strict=True))


def test_layers_of_stages_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "5,6")
    assert [sglang.get_pp_indices(11, rank, 2) for rank in range(2)] == [(0, 5), (5, 11)]
    assert sglang.get_pp_indices(7, 0, 1) == (0, 7)
    with pytest.raises(ValueError, match="11 layers on 2 stages"):
        sglang.get_pp_indices(12, 0, 2)


def test_groups_of_sizes() -> None:
    assert sglang.get_group_rank_size(None) == (0, 1)
    assert sglang.get_default_distributed_backend("cuda") == "nccl"
    assert sglang.get_default_distributed_backend("cpu") == "gloo"
    assert int.from_bytes(b"PpGr", "big") == P2PTag.GRAMMAR_PP_SYNC


def test_the_cuts_of_a_stage() -> None:
    """SGLang's own example: eight ranks, attention 2 x 4, experts 2 x 4."""
    kinds = ParallelSizes(tp=8, attn_cp=2, moe_dp=2, moe_ep=4).kinds()
    assert kinds["tp"] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert kinds["attn_cp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds["attn_tp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kinds["moe_ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kinds["moe_dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds["moe_tp"] == [[rank] for rank in range(8)]
    assert not {"dcp", "shared_experts_tp"} & kinds.keys()


def test_the_cuts_of_stages() -> None:
    kinds = ParallelSizes(tp=4, pp=2, attn_dp=2, moe_ep=2, dcp=2, shared_experts_tp=2).kinds()
    assert kinds["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds["attn_tp"] == kinds["dcp"] == kinds["shared_experts_tp"]
    assert kinds["attn_tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert kinds["moe_ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert kinds["moe_tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert kinds["self_pp"] == [[rank] for rank in range(8)]
    shared = ParallelSizes(tp=4, attn_cp=4, moe_dp=2).kinds()
    assert shared["moe_dp"] == shared["attn_cp"] == [[0, 1, 2, 3]]
    with pytest.raises(AssertionError, match="4 is not divisible by 3"):
        ParallelSizes(tp=4, attn_dp=3).kinds()


# --- groups -------------------------------------------------------------------------------


def start(rank: int, n: int, path: str, **cut: int) -> sglang.GroupCoordinator:
    sglang.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo", timeout=60)
    sglang.initialize_model_parallel(widths=ParallelSizes(**cut), duplicate_tp_group=True)
    return sglang.get_tp_group()


def collectives(rank: int, n: int, path: str) -> None:
    group = start(rank, n, path, tp=n)
    x = torch.arange(6.0).reshape(3, 2) + rank
    inputs = [torch.arange(6.0).reshape(3, 2) + other for other in range(n)]
    total = torch.stack(inputs).sum(0)
    for reduce in (
        sglang.tensor_model_parallel_all_reduce,
        sglang.tensor_model_parallel_quant_all_reduce,
        sglang.attention_tensor_model_parallel_all_reduce,
        sglang.moe_tensor_model_parallel_all_reduce,
    ):
        assert torch.equal(reduce(x), total)
    assert sglang.moe_expert_parallel_all_reduce(x) is x
    assert torch.equal(x, inputs[rank])
    inplace = x.clone()
    sglang.inplace_all_reduce(inplace, group.unique_name)
    assert torch.equal(inplace, total)
    weight = torch.ones(2)
    assert sglang.tensor_model_parallel_fused_allreduce_rmsnorm(x, x, weight, 1e-6) is None

    assert torch.equal(group.all_gather(x, 1), torch.cat(inputs, 1))
    listed = [torch.empty(3, 2) for _ in range(n)]
    assert group.all_gather(x, output_tensor_list=listed) is None
    assert all(torch.equal(*pair) for pair in zip(listed, inputs, strict=True))
    for shape in ((3 * n, 2), (n, 3, 2)):
        output = torch.empty(shape)
        group.all_gather_into_tensor(output=output, input=x)
        assert torch.equal(output.view(-1, 2), torch.cat(inputs))
    rows = torch.cat([torch.full((2, 2), float(to)) for to in range(n)]) + rank
    mine = torch.full((2, 2), float(n * rank + sum(range(n))))
    part = torch.empty(2, 2)
    group.reduce_scatter_tensor(part, rows)
    assert torch.equal(part, mine)
    assert group.reduce_scatter(part.zero_(), list(rows.chunk(n))) is part
    assert torch.equal(part, mine)
    assert torch.equal(group.reduce_scatter_along_dim(rows, dim=0), mine)
    assert torch.equal(group.reduce_scatterv(rows, part.zero_(), [2] * n), mine)
    assert torch.equal(part, mine)
    assert torch.equal(group.reduce_scatter_(rows.clone(), 0), mine)
    own_rows = torch.full((rank + 1, 2), float(rank))
    assert torch.equal(group.combine(group.dispatch(own_rows, own_rows, own_rows)[0]), own_rows * n)
    lists: list[tuple[type[Exception], list[torch.Tensor]]] = [
        (TypeError, [torch.zeros(3, 2, dtype=torch.int32) for _ in range(n)]),
        (ValueError, [torch.zeros(2, 3, 2) for _ in range(n)]),
        (ValueError, listed[1:]),
    ]
    for error, outputs in lists:
        with pytest.raises(error):
            group.all_gather(x, output_tensor_list=outputs)
    for parts in ([rows[:1], rows[1:4]], [rows[:2]]):
        with pytest.raises(ValueError, match=r"a part has 2 elements|1 inputs for a group"):
            group.reduce_scatter(part, parts)
    gathered = torch.empty(3, 2)
    assert group.all_gatherv(x[: rank + 1], [1, 2], gathered) is gathered
    assert torch.equal(gathered, torch.cat([inputs[0][:1], inputs[1][:2]]))
    swapped = torch.empty(n)
    group.all_to_all_single(swapped, torch.arange(float(n)) + 10 * rank)
    assert swapped.tolist() == [10.0 * other + rank for other in range(n)]

    y = torch.tensor([rank])
    assert group.broadcast(y, src=1) is y
    assert y.item() == 1
    assert sglang.attn_cp_tp_broadcast_pyobj([rank, "x"]) == [0, "x"]
    assert group.all_gather_object(rank) == list(range(n))
    assert sglang.get_group_rank_size(group) == (rank, n)
    with sglang.pdmux_prefill_tp_group():
        second = sglang.get_tp_group()
        assert second is not group
        assert second.all_reduce(torch.ones(1)).item() == n
    assert sglang.get_tp_group() is group
    alone = sglang.get_self_pp_group()
    with sglang.patch_tensor_parallel_group(alone, owns_attention=True):
        assert sglang.get_tp_group() is sglang.get_attn_tp_group() is alone
    with sglang.graph_capture() as context:
        assert context.stream is None
    custom = sglang.create_custom_parallel_group([1, 0])
    assert custom is not None
    counted = torch.ones(1)
    dist.all_reduce(counted, group=custom)
    assert counted.item() == n
    group.barrier()
    sglang.cleanup_dist_env_and_memory()


def test_collectives(store_path: str) -> None:
    run_ranks(2, collectives, store_path)


def tagged_in_threads(rank: int, group: sglang.GroupCoordinator) -> None:
    """Each thread gets its own, whichever of them took it in."""
    for order in ((1, 2), (2, 1)):
        if rank == 0:
            time.sleep(0.1)  # both threads wait by then
            for tag in order:
                group.send_object(tag, 1, tag=tag)
        else:
            with ThreadPoolExecutor(2) as threads:
                found = threads.map(lambda tag: group.recv_object(0, tag), (1, 2))
                assert list(found) == [1, 2]
        group.barrier()


def tagged_by_threads(rank: int, group: sglang.GroupCoordinator) -> None:
    """Each thread has a tag for its messages, longer than a frame, on both sides."""
    numbers = range(300)

    def send(tag: int) -> None:
        for number in numbers:
            group.send_object((number, bytes([tag]) * 4000), 1, tag=tag)

    def receive(tag: int) -> None:
        for number in numbers:
            assert group.recv_object(0, tag) == (number, bytes([tag]) * 4000)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(receive if rank else send, tag) for tag in (1, 2)]:
            done.result()
    group.barrier()


def messages(rank: int, n: int, path: str) -> None:
    group = start(rank, n, path, pp=n)
    group = sglang.get_pp_group()
    x, tag = torch.arange(4.0), P2PTag.HICACHE_PP_SYNC
    if rank == 0:
        tagged = group.send_object([1, "a"], dst=1, async_send=True, tag=tag)
        works = group.send_object({"plain": x}, 1, True)
        sent = group.send_tensor_dict({"x": x, "n": 3}, async_send=True)
        assert isinstance(sent, list)
        assert group.send_object("after", 1) == []
        for each in (*tagged, *works, *sent):
            assert isinstance(each, sglang.P2PWork)
            assert each.work is not None
            each.work.wait()
            assert each.work.is_completed()
        assert group.send_object("other", 1, tag=P2PTag.GRAMMAR_PP_SYNC) == []
        assert group.send_object("second", 1, tag=tag) == []
    else:
        assert torch.equal(group.recv_object(src=0)["plain"], x)
        found = group.recv_tensor_dict()
        assert found is not None
        assert torch.equal(found["x"], x)
        assert group.recv_object(0) == "after"
        assert group.recv_object(src=0, tag=P2PTag.GRAMMAR_PP_SYNC) == "other"
        assert [group.recv_object(src=0, tag=tag) for _ in range(2)] == [[1, "a"], "second"]
    tagged_in_threads(rank, group)
    tagged_by_threads(rank, group)
    inbox = group._tagged._messenger._inboxes[1 - rank]
    assert inbox.open == inbox.unexpected == []
    swapped: Any = group.send_recv_tensor_dict({"from": rank, "x": x + rank})
    assert swapped["from"] == 1 - rank
    assert torch.equal(swapped["x"], x + 1 - rank)
    group.barrier()
    sglang.cleanup_dist_env_and_memory()


def test_messages(store_path: str) -> None:
    run_ranks(2, messages, store_path)


def made_by_hand(rank: int, n: int, path: str) -> None:
    """A group with SGLang's arguments, over a default process group that is there."""
    pg = init_gloo(rank, n, path)
    flags = (False,) * 6
    group = sglang.GroupCoordinator([[0, 1]], rank, "gloo", *flags, True, "mine")
    assert group.broadcast_object("hello" if rank == 0 else None) == "hello"
    assert group.mq_broadcaster is not None
    assert group.all_reduce(torch.ones(1)).item() == n
    with pytest.raises(ValueError, match="resized"):
        sglang.GroupCoordinator([[0, 1]], rank, "gloo", *flags, recovered_rank=True)
    queue = MessageQueue.create_from_process_group(pg, 1 << 20, 2, writer_rank=0)
    assert queue.broadcast_object([1] if rank == 0 else None) == [1]
    assert sglang.in_the_same_node_as(pg) == [True, True]
    group.barrier()
    queue.shutdown()
    group.destroy()
    dist.destroy_process_group()


def test_made_by_hand(store_path: str) -> None:
    run_ranks(2, made_by_hand, store_path)


def test_before_and_after(store_path: str) -> None:
    with pytest.raises(AssertionError, match="not initialised"):
        sglang.get_tp_group()
    sglang.abort_distributed_environment()
    sglang.init_distributed_environment(1, 0, f"file://{store_path}", 0, "gloo")
    try:
        with pytest.raises(ValueError, match="takes 2 ranks, not 1"):
            sglang.initialize_model_parallel(widths=ParallelSizes(tp=2))
        with pytest.raises(ValueError, match="resized"):
            sglang.initialize_model_parallel(rank_offset=1)
        sglang.initialize_model_parallel()
        group, x = sglang.get_tp_group(), torch.ones(2)
        assert group.all_gather(x) is group.reduce_scatter_along_dim(x) is x
        assert group.send_tensor_dict({"x": x}) == {"x": x}
        assert group.recv_tensor_dict() is group.send_recv_tensor_dict({}) is None
        assert sglang.get_dcp_group_no_assert() is None
        with sglang.patch_tensor_parallel_group(group, owns_attention=True):
            sglang.destroy_model_parallel()
        assert not sglang.model_parallel_is_initialized()
    finally:
        sglang.abort_distributed_environment()
    assert not sglang.model_parallel_is_initialized()
    assert not dist.is_initialized()
