"""What calls of vLLM and SGLang do here, on real ranks; and the values of their helpers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import GroupCoordinator, ReduceOp
from coordinator.compat import sglang, vllm
from coordinator.compat.sglang.communication_tags import P2PTag
from coordinator.compat.sglang.parallel_state import ParallelSizes
from coordinator.compat.vllm.device_communicators.shm_broadcast import Handle, MessageQueue
from coordinator.compat.vllm.stateless_coordinator import StatelessGroupCoordinator
from tests.ranks import init_gloo, run_ranks

# --- helpers -----------------------------------------------------------------------------


def test_division() -> None:
    assert vllm.divide(12, 4) == 3
    vllm.ensure_divisibility(12, 4)
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="13 is not divisible by 4"):
            vllm.divide(13, 4)


def test_split_along_the_last_dim() -> None:
    x = torch.arange(12).reshape(2, 6)
    views = vllm.split_tensor_along_last_dim(x, 3)
    assert [part.tolist() for part in views] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert views[0].data_ptr() == x.data_ptr()
    pieces = vllm.split_tensor_along_last_dim(
        tensor=x, num_partitions=2, contiguous_split_chunks=True
    )
    assert all(part.is_contiguous() for part in pieces)
    with pytest.raises(AssertionError):
        vllm.split_tensor_along_last_dim(x, 4)


@pytest.mark.parametrize(
    ("engine", "layers", "starts"),
    [
        # What is left over goes to the last stages, of vLLM's but the very last one.
        (vllm, 8, [0, 2, 4, 6]),
        (vllm, 9, [0, 2, 4, 7]),
        (vllm, 10, [0, 2, 5, 8]),
        (vllm, 11, [0, 3, 6, 9]),
        (vllm, 5, [0, 3]),
        (vllm, 7, [0, 2, 5]),
        (vllm, 2, [0, 1, 2]),
        (vllm, 5, [0]),
        (sglang, 8, [0, 2, 4, 6]),
        (sglang, 9, [0, 2, 4, 6]),
        (sglang, 11, [0, 2, 5, 8]),
        (sglang, 5, [0]),
        (sglang, 1, [0, 0]),
    ],
)
def test_layers_of_stages(
    engine: Any, layers: int, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM", "SGLANG"):
        monkeypatch.delenv(f"{name}_PP_LAYER_PARTITION", raising=False)
    ends, stages = [*starts[1:], layers], len(starts)
    found = [engine.get_pp_indices(layers, rank, stages) for rank in range(stages)]
    assert found == list(zip(starts, ends, strict=True))


@pytest.mark.parametrize(("engine", "name"), [(vllm, "VLLM"), (sglang, "SGLANG")])
def test_layers_of_stages_by_the_environment(
    engine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{name}_PP_LAYER_PARTITION", "5,2,4")
    found = [engine.get_pp_indices(11, rank, 3) for rank in range(3)]
    assert found == [(0, 5), (5, 7), (7, 11)]
    for layers, stages in ((12, 3), (11, 2)):
        with pytest.raises(ValueError, match="11 layers on 3 stages"):
            engine.get_pp_indices(layers, 0, stages)
    assert sglang.get_pp_indices(7, 0, 1) == (0, 7)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,x")
    with pytest.raises(ValueError, match="must be numbers"):
        vllm.get_pp_indices(11, 0, 2)


def test_sglangs_groups_of_a_stage() -> None:
    """SGLang's own example: eight ranks, attention 2 x 4, experts 2 x 4."""
    assert sglang.get_default_distributed_backend("cuda") == "nccl"
    assert sglang.get_default_distributed_backend("cpu") == "gloo"
    assert int.from_bytes(b"PpGr", "big") == P2PTag.GRAMMAR_PP_SYNC
    kinds = ParallelSizes(tp=8, attn_cp=2, moe_dp=2, moe_ep=4).kinds()
    assert kinds["tp"] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert kinds["attn_cp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds["attn_tp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kinds["moe_ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kinds["moe_dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert kinds["moe_tp"] == [[rank] for rank in range(8)]
    assert not {"dcp", "shared_experts_tp"} & kinds.keys()


def test_sglangs_groups_of_stages() -> None:
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


# --- vLLM --------------------------------------------------------------------------------


def collectives(rank: int, n: int, path: str) -> None:
    vllm.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    assert vllm.broadcast_tensor_dict.__module__.startswith("coordinator.compat")
    assert vllm.get_dcp_world_size_and_rank() == (1, 0)
    vllm.ensure_model_parallel_initialized(n, 1, data_parallel_size=1)
    with pytest.raises(ValueError, match="'dp': 1"):
        vllm.ensure_model_parallel_initialized(n, 1, data_parallel_size=2)
    group = vllm.get_tp_group()
    assert isinstance(group, vllm.GroupCoordinator)
    assert (group.group_ranks, group.device_index) == ([list(range(n))], rank)
    assert (group.torch_distributed_backend, group.use_device_communicator) == ("gloo", True)
    assert group.is_last_rank == (rank == n - 1)

    base = torch.arange(4.0).reshape(2, 2)
    x = base + rank
    kept = x.clone()
    total = base * n + sum(range(n))
    assert torch.equal(vllm.tensor_model_parallel_all_reduce(input_=x), total)
    assert torch.equal(x, kept)
    for dim in (0, -1):
        whole = torch.cat([base + other for other in range(n)], dim)
        assert torch.equal(vllm.tensor_model_parallel_all_gather(x, dim=dim), whole)
        gathered = vllm.tensor_model_parallel_gather(x, 1, dim)
        assert gathered is None if rank != 1 else torch.equal(gathered, whole)
    parts = torch.ones(n, 3)
    scattered = vllm.tensor_model_parallel_reduce_scatter(input_=parts, dim=0)
    assert torch.equal(scattered, torch.full((1, 3), float(n)))

    assert torch.equal(group.all_reduce(x, op=ReduceOp.MAX), base + n - 1)
    assert torch.equal(group.all_reduce_(x.clone()), total)
    ours = group.group
    assert type(ours) is GroupCoordinator
    assert torch.equal(ours.broadcast(x, 1), base + 1)
    assert torch.equal(x, kept)
    y = torch.full((3,), float(rank))
    assert group.broadcast(input_=y, src=1) is y
    assert y.tolist() == [1.0] * 3
    wide = torch.full((n, 2), float(rank))
    assert group.broadcast(wide[:, 0], 1)[0] == 1
    assert wide[0].tolist() == [1.0, rank]
    told = vllm.broadcast_tensor_dict({"x": x, "n": 7} if rank == 0 else None)
    assert told["n"] == 7
    assert torch.equal(told["x"], base)

    counts = torch.tensor([rank, 1])
    assert group.cpu_all_reduce_(tensor=counts) is counts
    assert counts.tolist() == [sum(range(n)), n]
    sizes = list(range(1, n + 1))
    rows = group.all_gatherv(torch.full((rank + 1, 2), float(rank)), dim=0, sizes=sizes)
    assert rows[:, 0].tolist() == [float(other) for other in range(n) for _ in range(other + 1)]
    own = group.reduce_scatterv(rows, dim=0, sizes=sizes)
    assert own.tolist() == [[float(rank * n)] * 2] * (rank + 1)
    assert group.device_communicator.all2all_manager is None
    assert torch.equal(group.device_communicator.all_reduce(x), total)
    with group.graph_capture() as context:
        assert context.stream is None
    vllm.get_world_group().barrier()
    vllm.cleanup_dist_env_and_memory()
    assert ours.closed


def stages(rank: int, n: int, path: str) -> None:
    vllm.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")
    vllm.initialize_model_parallel(2, 2)
    pp, tp = vllm.get_pp_group(), vllm.get_tp_group()
    x = torch.arange(6.0).reshape(3, 2)
    odd = torch.arange(3.0)
    sent: dict[str, Any] = {"x": x, "odd": odd, "step": 4}
    if pp.is_first_rank:
        assert pp.send_tensor_dict(tensor_dict=sent, all_gather_group=tp) is None
        handles = pp.isend_tensor_dict(sent, all_gather_group=tp, all_gather_tensors={"x": False})
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
        pp.send_object(obj=["a"], dst=1)
        pp.isend_object({"b": 1}, 1).wait()
        pp.send(tensor=x, dst=1)
        pp.send(torch.arange(4))
    else:
        found = pp.recv_tensor_dict(all_gather_group=tp)
        assert found is not None
        assert torch.equal(found["x"], x)
        later, works, post = pp.irecv_tensor_dict(all_gather_group=tp)
        assert later is not None
        for work in works:
            work.wait()
        for fill in post:
            fill()
        assert (list(later), later["step"]) == (["x", "odd", "step"], 4)
        assert torch.equal(later["odd"], odd)
        assert pp.recv_object(src=0) == ["a"]
        assert pp.recv_object(0) == {"b": 1}
        assert torch.equal(pp.recv(size=x.size(), dtype=x.dtype), x)
        assert pp.recv(4, torch.int64).tolist() == [0, 1, 2, 3]
    vllm.get_world_group().barrier()
    vllm.cleanup_dist_env_and_memory()


def stateless(rank: int, n: int, path: str) -> None:
    store, listener = dist.FileStore(path, n), None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        store.set("port", str(listener.getsockname()[1]))
    port = int(store.get("port"))
    more = {"data_expiration_seconds": 1, "store_timeout": 60, "listen_socket": listener}
    group = vllm.StatelessProcessGroup.create("127.0.0.1", port, rank, n, **more)
    assert vllm.in_the_same_node_as(group) == [True] * n
    counted = torch.tensor([rank + 1.0])
    with pytest.raises(TypeError, match="op must be one of"):
        group.all_reduce(counted, dist.ReduceOp.PREMUL_SUM)
    group.expire_data()
    group.barrier()
    group.close()
    with vllm.StatelessProcessGroup(rank=rank, world_size=n, store=store) as given:
        assert given.all_gather_obj(rank) == list(range(n))

    over = StatelessGroupCoordinator(
        [[0, 1]], rank, "gloo", True, store, group_name="dp", global_rank=rank
    )
    assert (over.size(), over.backend) == (n, "gloo")
    assert over.all_reduce(torch.ones(1)).item() == n
    assert over.tcp_store_group.all_gather_obj(rank) == list(range(n))
    again = vllm.GroupCoordinator.from_process_group(over.cpu_group, "again", local_rank=3)
    assert again.local_rank == again.device_index == 3
    assert again.group_ranks == [list(range(n))]
    assert again.all_gather(torch.tensor([rank])).tolist() == list(range(n))
    assert again.broadcast(torch.tensor([rank]), src=1).item() == 1
    over.barrier()
    again.destroy()
    over.destroy()


def test_queue_in_vllms_words() -> None:
    sizes = {"max_chunk_bytes": 1 << 16, "max_chunks": 2, "enable_shm_tensor_arena": True}
    writer = MessageQueue(2, 2, [4, 7], **sizes)
    assert (writer.n_local_reader, writer.n_remote_reader, writer.shutting_down) == (2, 0, False)
    handle = writer.export_handle()
    assert isinstance(handle, Handle)
    assert handle.local_reader_ranks == [4, 7]
    assert handle.buffer_handle is not None
    assert (handle.remote_subscribe_addr, handle.remote_addr_ipv6) == (None, False)
    assert (handle.local_subscribe_addr, handle.local_notify_addr) == (None, None)
    readers = [MessageQueue.create_from_handle(handle, rank) for rank in (4, 7)]
    for each in (writer, *readers):
        each.wait_until_ready()
    writer.enqueue(obj={"step": 1}, timeout=10)
    assert [each.dequeue(timeout=10, indefinite=True) for each in readers] == [{"step": 1}] * 2
    assert writer.broadcast_object(obj=[1]) == [1]
    assert [each.broadcast_object() for each in readers] == [[1]] * 2
    with writer.acquire_write(timeout=10) as buffer:
        assert len(buffer) == 1 << 16
        buffer[:3] = b"abc"
    for each in readers:
        with each.acquire_read(timeout=10, indefinite=False) as view:
            assert (bytes(view[:4]), len(view)) == (b"abc\0", 1 << 16)
    large = torch.ones(1 << 19)
    writer.enqueue(large, 10)
    assert all(torch.equal(each.dequeue(10), large) for each in readers)
    with pytest.raises(KeyError), writer.acquire_write():
        raise KeyError
    with pytest.raises(TimeoutError):  # nothing was sent
        readers[0].dequeue(timeout=0.01, indefinite=True)
    readers[0].shutdown()
    assert readers[0].shutting_down
    writer.shutdown()
    readers[1].shutdown()


def queues_of_a_group(rank: int, n: int, path: str) -> None:
    pg = init_gloo(rank, n, path)
    queue = MessageQueue.create_from_process_group(pg, 1 << 20, 2, writer_rank=1)
    assert queue.broadcast_object("all" if rank == 1 else None) == "all"
    back, handles = MessageQueue.create_from_process_group_single_reader(pg, 1 << 20, 2, 1)
    back.enqueue(rank)
    if rank == 1:
        assert [each.local_reader_ranks for each in handles] == [[0], [0], [0]]
        readers = [MessageQueue.create_from_handle(each, 0) for each in handles]
        assert [each.dequeue(30) for each in readers] == [0, 1, 2]
    group = vllm.GroupCoordinator([[0, 1, 2]], rank, "gloo", True, False, "mine")
    own = group.create_mq_broadcaster(writer_rank=2)
    assert own.broadcast_object("mine" if rank == 2 else None) == "mine"
    single, found = group.create_single_reader_mq_broadcasters(reader_rank_in_group=0)
    single.enqueue(-rank)
    if rank == 0:
        assert all(isinstance(each, Handle) for each in found)
        readers = [MessageQueue.create_from_handle(each, 0) for each in found]
        assert [each.dequeue(30) for each in readers] == [0, -1, -2]
    group.barrier()
    for each in (queue, back, own, single):
        each.shutdown()
    group.destroy()
    dist.destroy_process_group()


# --- SGLang ------------------------------------------------------------------------------


def start(rank: int, n: int, path: str, **cut: int) -> sglang.GroupCoordinator:
    sglang.init_distributed_environment(n, rank, f"file://{path}", rank, "gloo", timeout=60)
    sglang.initialize_model_parallel(widths=ParallelSizes(**cut), duplicate_tp_group=True)
    return sglang.get_tp_group()


def sglang_collectives(rank: int, n: int, path: str) -> None:
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
    flags = (False,) * 6
    own = sglang.GroupCoordinator([[0, 1]], rank, "gloo", *flags, True, "mine")
    assert own.broadcast_object("hello" if rank == 0 else None) == "hello"
    assert own.mq_broadcaster is not None
    with pytest.raises(ValueError, match="resized"):
        sglang.GroupCoordinator([[0, 1]], rank, "gloo", *flags, recovered_rank=True)
    assert sglang.in_the_same_node_as(own.cpu_group) == [True, True]
    group.barrier()
    own.destroy()
    sglang.cleanup_dist_env_and_memory()


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


def test_sglangs_functions_before_and_after(store_path: str) -> None:
    with pytest.raises(AssertionError, match="not initialised"):
        sglang.get_tp_group()
    assert sglang.get_group_rank_size(None) == (0, 1)
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


@pytest.mark.parametrize(
    ("n", "body"),
    [
        *((3, collectives), (4, stages), (2, stateless), (3, queues_of_a_group)),
        *((2, sglang_collectives), (2, messages)),
    ],
)
def test_calls_on_real_ranks(n: int, body: Callable[..., None], store_path: str) -> None:
    run_ranks(n, body, store_path)
