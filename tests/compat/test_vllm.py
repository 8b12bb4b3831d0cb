"""What vLLM's calls do here, on real ranks; and the values of its helpers."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import GroupCoordinator, ReduceOp
from coordinator.compat import vllm
from coordinator.compat.vllm.device_communicators.shm_broadcast import Handle, MessageQueue
from coordinator.compat.vllm.stateless_coordinator import StatelessGroupCoordinator
from shm_broadcast import GroupClosedError
from tests.ranks import init_gloo, run_ranks

# --- helpers ------------------------------------------------------------------------------


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
    ("layers", "stages", "starts"),
    [
        (8, 4, [0, 2, 4, 6]),
        (9, 4, [0, 2, 4, 7]),
        (10, 4, [0, 2, 5, 8]),
        (11, 4, [0, 3, 6, 9]),
        (5, 2, [0, 3]),
        (7, 3, [0, 2, 5]),
        (2, 3, [0, 1, 2]),
        (5, 1, [0]),
    ],
)
def test_layers_of_stages(
    layers: int, stages: int, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left over goes to the last stages but the very last one."""
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    ends = [*starts[1:], layers]
    found = [vllm.get_pp_indices(layers, rank, stages) for rank in range(stages)]
    assert found == list(zip(starts, ends, strict=True))


def test_layers_of_stages_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,2,4")
    assert [vllm.get_pp_indices(11, rank, 3) for rank in range(3)] == [(0, 5), (5, 7), (7, 11)]
    for layers, stages in ((12, 3), (11, 2)):
        with pytest.raises(ValueError, match="11 layers on 3 stages"):
            vllm.get_pp_indices(layers, 0, stages)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,x")
    with pytest.raises(ValueError, match="must be numbers"):
        vllm.get_pp_indices(11, 0, 2)


# --- groups -------------------------------------------------------------------------------


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

    x = torch.arange(4.0).reshape(2, 2) + rank
    kept = x.clone()
    total = torch.arange(4.0).reshape(2, 2) * n + sum(range(n))
    assert torch.equal(vllm.tensor_model_parallel_all_reduce(input_=x), total)
    assert torch.equal(x, kept)
    for dim in (0, -1):
        whole = torch.cat([torch.arange(4.0).reshape(2, 2) + other for other in range(n)], dim)
        assert torch.equal(vllm.tensor_model_parallel_all_gather(x, dim=dim), whole)
        gathered = vllm.tensor_model_parallel_gather(x, 1, dim)
        assert gathered is None if rank != 1 else torch.equal(gathered, whole)
    parts = torch.ones(n, 3)
    scattered = vllm.tensor_model_parallel_reduce_scatter(input_=parts, dim=0)
    assert torch.equal(scattered, torch.full((1, 3), float(n)))

    assert torch.equal(
        group.all_reduce(x, op=ReduceOp.MAX), torch.arange(4.0).reshape(2, 2) + n - 1
    )
    assert torch.equal(group.all_reduce_(x.clone()), total)
    ours = group.group
    assert type(ours) is GroupCoordinator
    assert torch.equal(ours.broadcast(x, 1), torch.arange(4.0).reshape(2, 2) + 1)
    assert torch.equal(x, kept)
    y = torch.full((3,), float(rank))
    assert group.broadcast(input_=y, src=1) is y
    assert y.tolist() == [1.0] * 3
    wide = torch.full((n, 2), float(rank))
    assert group.broadcast(wide[:, 0], 1)[0] == 1
    assert wide[0].tolist() == [1.0, rank]
    told = vllm.broadcast_tensor_dict({"x": x, "n": 7} if rank == 0 else None)
    assert told["n"] == 7
    assert torch.equal(told["x"], torch.arange(4.0).reshape(2, 2))

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


@pytest.mark.parametrize("n", [2, 3])
def test_collectives(n: int, store_path: str) -> None:
    run_ranks(n, collectives, store_path)


def stages(rank: int, n: int, path: str) -> None:
    """Two stages of two ranks: what a model runner does between them."""
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
    own = vllm.init_model_parallel_group([[0, 1], [2, 3]], rank, "gloo", True, "own")
    assert own.group_ranks == [[0, 1], [2, 3]]
    assert own.mq_broadcaster is not None
    assert own.broadcast_object([rank] if own.is_first_rank else None) == [own.first_rank]
    sibling = own.make_sibling_device_group(group_desc="beside")
    assert dist.get_world_size(sibling) == 2
    vllm.get_world_group().barrier()
    own.destroy()
    vllm.cleanup_dist_env_and_memory()


def test_stages(store_path: str) -> None:
    run_ranks(4, stages, store_path)


def test_group_of_one(store_path: str) -> None:
    vllm.init_distributed_environment(1, 0, f"file://{store_path}", 0, "gloo")
    vllm.initialize_model_parallel()
    try:
        group, x = vllm.get_pp_group(), torch.ones(2)
        for verb in (group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast):
            assert verb(x) is x
        assert group.gather(x) is x
        sent = {"x": x}
        assert group.send_tensor_dict(sent) is sent
        assert group.isend_tensor_dict(sent) == []
        assert group.recv_tensor_dict() is None
        assert group.irecv_tensor_dict() == (None, [], [])
        assert group.broadcast_tensor_dict(sent) is sent
        assert (dist.get_world_size(group.cpu_group), group.device_group.size()) == (1, 1)
        with pytest.raises(AssertionError, match="'eplb' is not initialised"):
            vllm.get_eplb_group()
    finally:
        vllm.cleanup_dist_env_and_memory()
    with pytest.raises(AssertionError, match="not initialised"):
        vllm.get_tp_group()


def stateless(rank: int, n: int, path: str) -> None:
    """Groups that need no default process group; rank 0 has the socket that it listens on."""
    store, listener = dist.FileStore(path, n), None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        store.set("port", str(listener.getsockname()[1]))
    port = int(store.get("port"))
    group = vllm.StatelessProcessGroup.create(
        "127.0.0.1",
        port,
        rank,
        n,
        data_expiration_seconds=1,
        store_timeout=60,
        listen_socket=listener,
    )
    assert group.all_gather_obj(rank) == list(range(n))
    assert group.broadcast_obj("hello" if rank == 1 else None, 1) == "hello"
    assert vllm.in_the_same_node_as(group) == [True] * n
    counted = torch.tensor([rank + 1.0])
    assert group.all_reduce(counted).item() == sum(range(n + 1))
    assert group.all_reduce(counted, dist.ReduceOp.MAX).item() == n
    with pytest.raises(TypeError, match="op must be one of"):
        group.all_reduce(counted, dist.ReduceOp.PREMUL_SUM)
    group.expire_data()
    group.barrier()
    group.close()

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


def test_stateless_groups(store_path: str) -> None:
    run_ranks(2, stateless, store_path)


# --- queues -------------------------------------------------------------------------------


def test_queue_in_vllms_words() -> None:
    writer = MessageQueue(2, 2, [4, 7], max_chunk_bytes=1 << 16, max_chunks=2)
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
    with pytest.raises(TimeoutError):
        readers[0].dequeue(timeout=0.01, indefinite=True)
    readers[0].shutdown()
    assert readers[0].shutting_down
    writer.shutdown()
    readers[1].shutdown()


def test_nothing_is_sent_where_the_block_raises() -> None:
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 16, enable_shm_tensor_arena=True)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(KeyError), writer.acquire_write():
        raise KeyError
    large = torch.ones(1 << 19)
    writer.enqueue(large, 10)
    assert torch.equal(reader.dequeue(10), large)
    writer.shutdown()
    reader.shutdown()


def test_shutdown_wakes_a_reader() -> None:
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    threading.Timer(0.1, reader.shutdown).start()
    with pytest.raises(GroupClosedError):
        reader.dequeue(timeout=30)
    writer.shutdown()


def queues_of_a_group(rank: int, n: int, path: str) -> None:
    pg = init_gloo(rank, n, path)
    queue = MessageQueue.create_from_process_group(pg, 1 << 20, 2, writer_rank=1)
    assert queue.broadcast_object("all" if rank == 1 else None) == "all"
    back, handles = MessageQueue.create_from_process_group_single_reader(pg, 1 << 20, 2, 1)
    back.enqueue(rank)
    if rank == 1:
        assert [each.local_reader_ranks for each in handles] == [[0], [0], [0]]
        assert [MessageQueue.create_from_handle(each, 0).dequeue(30) for each in handles] == [
            0,
            1,
            2,
        ]
    group = vllm.GroupCoordinator([[0, 1, 2]], rank, "gloo", True, False, "mine")
    own = group.create_mq_broadcaster(writer_rank=2)
    assert own.broadcast_object("mine" if rank == 2 else None) == "mine"
    single, found = group.create_single_reader_mq_broadcasters(reader_rank_in_group=0)
    single.enqueue(-rank)
    if rank == 0:
        assert all(isinstance(each, Handle) for each in found)
        assert [MessageQueue.create_from_handle(each, 0).dequeue(30) for each in found] == [
            0,
            -1,
            -2,
        ]
    group.barrier()
    for each in (queue, back, own, single):
        each.shutdown()
    group.destroy()
    dist.destroy_process_group()


def test_queues_of_a_group(store_path: str) -> None:
    run_ranks(3, queues_of_a_group, store_path)
