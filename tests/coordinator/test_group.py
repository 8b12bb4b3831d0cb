"""`GroupCoordinator` as vLLM's users build it, and around what others have built."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from coordinator import GroupCoordinator, torch_groups
from coordinator.member import LINGER
from shm_broadcast import (
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
)
from tests.patience import NAMED_WITHIN, all_here, quickest, until
from tests.ranks import init_gloo, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def positions(rank: int, n: int, path: str) -> tuple[Any, ...]:
    init_gloo(rank, n, path)
    with GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True, group_name="tp") as group:
        assert (group.rank, group.local_rank, group.name) == (rank, rank, "tp")
        assert group.device == torch.device("cpu")
        assert group.all_gather(torch.tensor([[rank]])).tolist() == [group.ranks]
        return group.ranks, group.rank_in_group, group.world_size


def test_constructor(store_path: str) -> None:
    """[[0, 1], [2, 3]]: rank 3 is rank 1 of its group."""
    assert run_ranks(4, positions, store_path) == [
        ([0, 1], 0, 2),
        ([0, 1], 1, 2),
        ([2, 3], 0, 2),
        ([2, 3], 1, 2),
    ]


def only_members(rank: int, n: int, path: str) -> None:
    """N5: a group is built by its members alone, while the others do nothing."""
    init_gloo(rank, n, path)
    if rank in (1, 3):
        group = GroupCoordinator([[1, 3]], rank, "gloo", False, True, "pair")
        assert group.ranks == [1, 3]
        assert group.rank_in_group == (rank == 3)
        assert (group.first_rank, group.last_rank) == (1, 3)
        assert group.next_rank == group.prev_rank == 4 - rank
        assert group.is_first_rank == (rank == 1)
        assert group.is_last_rank == (rank == 3)
        assert group.mq_broadcaster is not None
        for src in (0, 1):  # with a queue, and beside it
            sent = {"src": src, "data": torch.ones(3)} if group.rank_in_group == src else None
            found = group.broadcast_object(sent, src)
            assert found["src"] == src
        again = GroupCoordinator([[1, 3]], rank, "gloo", False, False, "pair")
        assert again.all_reduce(torch.tensor([rank])).item() == 4
        again.close()
        assert group.broadcast(torch.tensor([rank]), src=1).item() == 3
        group.destroy()
        group.destroy()
        with pytest.raises(GroupClosedError):
            group.all_reduce(torch.ones(1))
        third = GroupCoordinator([[3, 1]], rank, "gloo", False, False, "pair")
        assert third.ranks == [3, 1]
        assert third.all_gather(torch.tensor([rank])).tolist() == [3, 1]
        third.close()
    dist.barrier()


def test_a_group_is_built_by_its_members(store_path: str) -> None:
    run_ranks(4, only_members, store_path)


def connects_late(rank: int, n: int, path: str) -> list[float]:
    """Rank 0 takes longer to connect; when it had, and when the group was there."""
    init_gloo(rank, n, path)
    connect, connected = torch_groups.connect_process_group, []

    def slowly(*args: Any) -> dist.ProcessGroup:
        group = connect(*args)
        time.sleep(0.3 if rank == 0 else 0)
        connected.append(time.monotonic())
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_groups, "connect_process_group", slowly)
        with GroupCoordinator([[0, 1]], rank, "gloo", False):
            return [*connected, time.monotonic()]


def test_a_member_leaves_only_once_all_have_connected(store_path: str) -> None:
    """Else the connections that the others are still making would break."""
    (connected, _), (_, there) = run_ranks(2, connects_late, store_path)
    assert connected < there


def singles(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    starts = [time.perf_counter()]
    for _ in range(3):
        group = GroupCoordinator([[0], [1]], rank, "gloo", True, True, "dp")
        starts.append(time.perf_counter())
    assert min(end - start for start, end in pairwise(starts)) < 0.5
    assert group.cpu_group.size() == 1
    assert group.mq_broadcaster is None
    assert group.all_reduce(torch.ones(1), async_op=True).wait().item() == 1
    with pytest.raises(TypeError, match="group_ranks must be groups, each a list of ranks; got "):
        GroupCoordinator([0, 1], rank, "gloo", True)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=f"rank {rank} has to be in one group"):
        GroupCoordinator([[1 - rank]], rank, "gloo", True)
    with pytest.raises(ValueError, match="has to be in one group, once"):
        GroupCoordinator([[0, 1], [1, 0]], rank, "gloo", True)
    with pytest.raises(ValueError, match="has to be in one group, once"):
        GroupCoordinator([[0, 1, 0, 1]], rank, "gloo", True)
    with pytest.raises(ValueError, match="rank 1 has to be in one group, once"):
        GroupCoordinator([[0, 1], [1]], rank, "gloo", True)
    for backend in ("mpi", "carrier pigeon", "cpu:"):
        with pytest.raises(ValueError, match=r"cannot make .* groups"):
            GroupCoordinator([[0, 1]], rank, backend, True, timeout=10)


def test_groups_of_one_and_wrong_groups(store_path: str) -> None:
    run_ranks(2, singles, store_path)


def wrapped(rank: int, n: int, path: str) -> None:
    world = init_gloo(rank, n, path)
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        group = GroupCoordinator.from_process_group(pair, "pair")
        assert (group.ranks, group.cpu_group) == ([1, 3], pair)
        assert group.all_reduce(torch.tensor([rank])).item() == 4
        assert group.broadcast_object(rank, src=1) == 3
        group.close()
        x = torch.tensor([rank])
        dist.all_reduce(x, group=pair)
        assert x.item() == 4
    with GroupCoordinator.from_process_group(world) as group:
        assert group.ranks == [0, 1, 2, 3]
        assert group.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]
        group.barrier()
    stream: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="a stream of cuda:0 is not for a group on cpu"):
        GroupCoordinator.from_process_group(world, stream=stream)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="choose one dimension"):
        GroupCoordinator.from_device_mesh(mesh)
    for name, ranks in (("tp", [rank & 2, rank | 1]), ("dp", [rank & 1, rank | 2])):
        ranks = [rank - rank % 2, rank - rank % 2 + 1] if name == "tp" else ranks
        with GroupCoordinator.from_device_mesh(mesh[name]) as group:
            assert (group.name, group.ranks) == (name, ranks)
            assert group.all_reduce(torch.tensor([rank])).item() == sum(ranks)
            group.barrier()


def test_wrapped_groups_and_meshes(store_path: str) -> None:
    run_ranks(4, wrapped, store_path)


def queues(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with GroupCoordinator([list(range(n))], rank, "gloo", True, False, "g") as group:
        payload = b"x" * (5 << 20)
        for writer in range(n):
            with group.create_mq_broadcaster(writer) as queue:
                assert queue.is_writer == (rank == writer)
                if queue.is_writer:
                    queue.enqueue({"from": writer, "payload": payload}, timeout=20)
                else:
                    assert queue.dequeue(timeout=20) == {"from": writer, "payload": payload}
                group.barrier()
        for writer in (n, -1):
            with pytest.raises(ValueError, match="writer_rank"):
                group.create_mq_broadcaster(writer)
        mine, handles = group.create_single_reader_mq_broadcasters(1)
        assert bool(handles) == (rank == 1)
        ends = [MessageQueue.create_from_handle(each, 0) for each in handles]
        mine.enqueue(("hello", rank), timeout=20)
        assert [end.dequeue(timeout=20) for end in ends] == [
            ("hello", src) for src in range(len(ends))
        ]
        group.barrier()
        for each in (*ends, mine):
            each.shutdown()


def test_queues_of_a_group(store_path: str) -> None:
    """From any writer; 5 MiB; and from all to reader 1."""
    run_ranks(3, queues, store_path)


def outside(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with GroupCoordinator([[0, 1]], rank, "gloo", True, False, "g") as group:
        source = MessageQueue(2, 2) if rank == 0 else None
        queue = group.create_mq_broadcaster(
            external_writer_handle=source.export_handle() if source else None, blocking=False
        )
        if source:
            source.wait_until_ready(20)
            source.enqueue("from outside", timeout=20)
        assert queue.dequeue(timeout=20) == "from outside"
        group.barrier()
        queue.shutdown()
        if source:
            source.shutdown()


def late_for_the_queue(rank: int, n: int, path: str) -> None:
    """A broadcast that timed out ends the group: nobody is a message behind."""
    init_gloo(rank, n, path)
    group = GroupCoordinator([[0, 1]], rank, "gloo", False, True, "tp")
    group.broadcast_object("first" if rank == 0 else None)
    if rank == 1:
        with pytest.raises(GroupTimeoutError):
            group.broadcast_object(timeout=0.2)
    dist.barrier()
    with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
        group.broadcast_object("late" if rank == 0 else None, timeout=20)


def test_a_broadcast_through_the_queue_that_times_out(store_path: str) -> None:
    run_ranks(2, late_for_the_queue, store_path)


def test_a_queue_whose_writer_is_outside(store_path: str) -> None:
    run_ranks(2, outside, store_path)


def one_is_late(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    store = dist.FileStore(f"{path}-beside", n)
    with GroupCoordinator([[0, 1]], rank, "gloo", True, False, "g") as group:
        if rank == 1:
            all_here(store, n)
        work = group.barrier(async_op=True)
        if rank == 0:
            with pytest.raises(GroupTimeoutError, match="waiting for rank 1"):
                work.wait(0.3)
            all_here(store, n)
        work.wait()


def test_a_late_rank_delays_the_barrier(store_path: str) -> None:
    run_ranks(2, one_is_late, store_path)


def one_never_comes(rank: int, n: int, path: str) -> str:
    init_gloo(rank, n, path)
    group = GroupCoordinator([[0, 1]], rank, "gloo", True, False, "tp")
    if rank == 1:
        group.send_object("the last thing it does", 0)
        all_here(dist.FileStore(f"{path}-beside", n), n)
        until(lambda: group.board.aborted)
        with pytest.raises(GroupAbortedError, match="waiting for rank 1"):
            group.barrier()
        return ""
    all_here(dist.FileStore(f"{path}-beside", n), n)
    with pytest.raises(GroupTimeoutError) as caught:
        group.barrier(timeout=0.4)
    assert [member.rank for member in caught.value.waiting_for] == [1]
    with pytest.raises(GroupAbortedError):
        group.all_reduce(torch.ones(1))
    group.close()
    return str(caught.value)


def test_a_barrier_has_a_deadline_and_names_who_did_not_come(store_path: str) -> None:
    text = run_ranks(2, one_never_comes, store_path)[0]
    assert "tp barrier: timed out after 0.4 s, waiting for rank 1" in text
    assert "last seen in tp send" in text


def one_of_a_part_dies(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    parts = [[0], [2, 1]]  # so that no rank is the same in its group
    if rank == 1:
        with pytest.raises(GroupTimeoutError) as absent:
            GroupCoordinator(parts, rank, "gloo", True, group_name="early", timeout=0.2)
        assert [member.rank for member in absent.value.waiting_for] == [2]
    group = GroupCoordinator(parts, rank, "gloo", True, group_name="part")
    if rank == 2:
        assert [member.rank for member in group.status()] == [2, 1]
        group.barrier()
        os._exit(0)
    if rank == 1:
        group.barrier()
        with pytest.raises(PeerLostError) as lost:
            group.recv_object(0)
        assert lost.value.rank == 2
        with pytest.raises(GroupAbortedError) as later:
            group.barrier()
        assert (later.value.failure.rank, later.value.failure.culprit) == (1, 2)
    group.close()


def test_errors_about_processes_name_global_ranks(store_path: str) -> None:
    run_ranks(3, one_of_a_part_dies, store_path, may_die=(2,))


def one_aborts(rank: int, n: int, path: str) -> float:
    init_gloo(rank, n, path)
    group = GroupCoordinator([[0, 1]], rank, "gloo", True, False, "tp")
    store = dist.FileStore(f"{path}-beside", n)
    group.check()
    if rank == 1:
        until(lambda: "recv" in group.status()[0].operation)
        store.set("aborted", repr(time.monotonic()))
        group.abort(KeyError("lost weights"))
    with pytest.raises(GroupAbortedError, match="KeyError: 'lost weights'") as caught:
        group.recv_object(1 - rank)
    ended = time.monotonic()
    assert caught.value.failure.rank == 1
    with pytest.raises(GroupAbortedError, match=r"tp check.*KeyError: 'lost weights'"):
        group.check()
    group.close()
    with pytest.raises(GroupClosedError):
        group.check()
    return ended - float(store.get("aborted"))


def test_an_abort_reaches_who_waits(tmp_path: Path) -> None:
    def attempt() -> float:
        return max(run_ranks(2, one_aborts, mkdtemp(dir=tmp_path) + "/store"))

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def undelivered(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    group = GroupCoordinator([[0, 1]], rank, "gloo", True, False, "tp")
    if rank == 0:
        group.isend_tensor_dict({"x": torch.ones(1 << 20)}, 1)
        group.send_object("x" * (1 << 20), 1)
    group.irecv_tensor_dict(1 - rank)
    store = dist.FileStore(f"{path}-beside", n)
    if rank == 1:
        all_here(store, n, "left")
    start = time.monotonic()
    group.close(linger=0.3)
    assert time.monotonic() - start < LINGER - 1, "0.3 s, and what a busy machine makes of it"
    if rank == 0:
        all_here(store, n, "left")


def test_closing_does_not_wait_long_for_messages_nobody_takes(store_path: str) -> None:
    run_ranks(2, undelivered, store_path)


def last_words(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with GroupCoordinator([[0, 1]], rank, "gloo", True, False, "tp") as group:
        if rank == 0:
            group.isend_tensor_dict({"x": torch.arange(1 << 20)}, 1)
            group.send(torch.ones(3), 1)
            group.send_object("last words", 1)
        else:
            time.sleep(0.3)
            assert group.recv_tensor_dict(0)["x"].sum().item() == (1 << 19) * ((1 << 20) - 1)
            assert group.recv((3,), torch.float32, 0).sum().item() == 3
            assert group.recv_object(0) == "last words"


def test_what_was_sent_before_closing_arrives(store_path: str) -> None:
    run_ranks(2, last_words, store_path)
