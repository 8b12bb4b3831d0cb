"""`GroupCoordinator` as vLLM's users build it, and around groups that others have built."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.device_mesh import init_device_mesh

import coordinator
from benchmarks.memory import shared_bytes
from coordinator import GroupCoordinator, call_counts, torch_groups
from coordinator.member import LINGER
from device_comm import Work
from shm_broadcast import (
    CoordinatorError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
)
from shm_broadcast.process import IN_FORKED_CHILD
from tests.coordinator.hosts import groups_over
from tests.forked import in_a_child
from tests.netns import two_hosts
from tests.patience import NAMED_WITHIN, all_here, quickest, until
from tests.ranks import init_gloo, run_ranks
from tests.shared_store import SharedStore

BOTH = pytest.mark.parametrize("torch_only", [False, True], ids=["shared memory", "torch"])


def pair(rank: int, n: int, path: str, queue: bool = False, name: str = "tp") -> GroupCoordinator:
    """A group of ranks 0 and 1 in torch's default group."""
    init_gloo(rank, n, path)
    return GroupCoordinator([[0, 1]], rank, "gloo", True, queue, name)


# --- constructors -------------------------------------------------------------------------


def built(rank: int, n: int, path: str) -> None:
    world = init_gloo(rank, n, path)
    with GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True, group_name="tp") as group:
        assert (group.rank, group.local_rank, group.name) == (rank, rank, "tp")
        assert (group.rank_in_group, group.world_size) == (rank % 2, 2)
        assert group.ranks == ([0, 1] if rank < 2 else [2, 3])
        assert group.device == torch.device("cpu")
        assert group.all_gather(torch.tensor([[rank]])).tolist() == [group.ranks]
    if rank in (1, 3):  # N5: its members build a group, the others do nothing
        by_members_alone(rank)
    dist.barrier()
    wrapped(rank, world)


def by_members_alone(rank: int) -> None:
    group = GroupCoordinator([[1, 3]], rank, "gloo", False, True, "pair")
    assert group.ranks == [1, 3]
    assert group.rank_in_group == (rank == 3)
    assert (group.first_rank, group.last_rank) == (1, 3)
    assert group.next_rank == group.prev_rank == 4 - rank
    assert (group.is_first_rank, group.is_last_rank) == (rank == 1, rank == 3)
    assert group.mq_broadcaster is not None
    for src in (0, 1):  # with a queue, and beside it
        sent = {"src": src, "data": torch.ones(3)} if group.rank_in_group == src else None
        assert group.broadcast_object(sent, src)["src"] == src
    again = GroupCoordinator([[1, 3]], rank, "gloo", False, False, "pair")
    assert again.all_reduce(torch.tensor([rank])).item() == 4
    again.close()
    assert group.broadcast(torch.tensor([rank]), src=1).item() == 3
    group.destroy()
    group.destroy()
    with pytest.raises(GroupClosedError):
        group.all_reduce(torch.ones(1))
    with GroupCoordinator([[3, 1]], rank, "gloo", False, False, "pair") as third:
        assert third.ranks == [3, 1]
        assert third.all_gather(torch.tensor([rank])).tolist() == [3, 1]


def wrapped(rank: int, world: dist.ProcessGroup) -> None:
    odd = dist.new_group([1, 3])
    if rank in (1, 3):
        group = GroupCoordinator.from_process_group(odd, "odd")
        assert (group.ranks, group.cpu_group) == ([1, 3], odd)
        assert group.all_reduce(torch.tensor([rank])).item() == 4
        assert group.broadcast_object(rank, src=1) == 3
        group.close()
        x = torch.tensor([rank])
        dist.all_reduce(x, group=odd)
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
        with GroupCoordinator.from_device_mesh(mesh[name]) as group:
            assert (group.name, group.ranks) == (name, ranks)
            assert group.all_reduce(torch.tensor([rank])).item() == sum(ranks)
            group.barrier()


def test_groups_are_built_and_wrapped(store_path: str) -> None:
    run_ranks(4, built, store_path)


def connects_late(rank: int, n: int, path: str) -> list[float]:
    """Rank 0 takes longer to connect; the moments of its connection and of the built group."""
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


def test_the_constructor_returns_once_all_have_connected(store_path: str) -> None:
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
    for wrong in ([[1 - rank]], [[0, 1], [1, 0]], [[0, 1, 0, 1]], [[0, 1], [1]]):
        with pytest.raises(ValueError, match=r"rank \d has to be in one group, once"):
            GroupCoordinator(wrong, rank, "gloo", True)
    for backend in ("mpi", "carrier pigeon", "cpu:"):
        with pytest.raises(ValueError, match=r"cannot make .* groups"):
            GroupCoordinator([[0, 1]], rank, backend, True, timeout=10)


def test_groups_of_one_are_quick_and_wrong_groups_refused(store_path: str) -> None:
    run_ranks(2, singles, store_path)


# --- queues -------------------------------------------------------------------------------


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
        outside = MessageQueue(n, n) if rank == 0 else None
        queue = group.create_mq_broadcaster(
            external_writer_handle=outside.export_handle() if outside else None, blocking=False
        )
        if outside:
            outside.wait_until_ready(20)
            outside.enqueue("from outside", timeout=20)
        assert queue.dequeue(timeout=20) == "from outside"
        group.barrier()
        for each in (*ends, mine, queue, *([outside] if outside else [])):
            each.shutdown()


def test_queues_of_a_group(store_path: str) -> None:
    """From any writer, from all to reader 1, and from a writer outside."""
    run_ranks(3, queues, store_path)


def late_for_the_queue(rank: int, n: int, path: str) -> None:
    group = pair(rank, n, path, queue=True)
    group.broadcast_object("first" if rank == 0 else None)
    if rank == 1:
        with pytest.raises(GroupTimeoutError):
            group.broadcast_object(timeout=0.2)
    dist.barrier()
    with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
        group.broadcast_object("late" if rank == 0 else None, timeout=20)


def test_a_broadcast_through_the_queue_that_times_out_ends_the_group(store_path: str) -> None:
    run_ranks(2, late_for_the_queue, store_path)


# --- deadlines, deaths and aborts -----------------------------------------------------------


def one_never_comes(rank: int, n: int, path: str) -> str:
    group = pair(rank, n, path)
    store = dist.FileStore(f"{path}-beside", n)
    if rank == 1:
        all_here(store, n)
    late = group.barrier(async_op=True)
    if rank == 0:
        with pytest.raises(GroupTimeoutError, match="waiting for rank 1"):
            late.wait(0.3)
        all_here(store, n)
    late.wait()
    if rank == 1:
        group.send_object("the last thing it does", 0)
        all_here(store, n, "last")
        until(lambda: group.board.aborted)
        with pytest.raises(GroupAbortedError, match="waiting for rank 1"):
            group.barrier()
        return ""
    all_here(store, n, "last")
    with pytest.raises(GroupTimeoutError) as caught:
        group.barrier(timeout=0.4)
    assert [member.rank for member in caught.value.waiting_for] == [1]
    with pytest.raises(GroupAbortedError):
        group.all_reduce(torch.ones(1))
    group.close()
    return str(caught.value)


def test_a_barrier_has_a_deadline_and_names_the_absent_rank(store_path: str) -> None:
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
    group = pair(rank, n, path)
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


def test_an_abort_reaches_a_waiting_rank(tmp_path: Path) -> None:
    def attempt() -> float:
        return max(run_ranks(2, one_aborts, mkdtemp(dir=tmp_path) + "/store"))

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


# --- the end of a group ---------------------------------------------------------------------


def undelivered(rank: int, n: int, path: str) -> None:
    group = pair(rank, n, path)
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


def test_closing_waits_for_undelivered_messages_as_long_as_it_is_told(store_path: str) -> None:
    run_ranks(2, undelivered, store_path)


def last_words(rank: int, n: int, path: str) -> None:
    with pair(rank, n, path) as group:
        if rank == 0:
            group.isend_tensor_dict({"x": torch.arange(1 << 20)}, 1)
            group.send(torch.ones(3), 1)
            group.send_object("last words", 1)
        else:
            time.sleep(0.3)
            assert group.recv_tensor_dict(0)["x"].sum().item() == (1 << 19) * ((1 << 20) - 1)
            assert group.recv((3,), torch.float32, 0).sum().item() == 3
            assert group.recv_object(0) == "last words"


def test_messages_sent_before_closing_arrive(store_path: str) -> None:
    run_ranks(2, last_words, store_path)


def use(groups: coordinator.ParallelGroups, rank: int) -> None:
    tp, x = groups.tp, torch.ones(1000)
    tp.all_reduce(x)
    tp.all_reduce(x, async_op=True).wait()
    tp.all_gatherv(x, 0)
    if rank == 0:
        tp.isend(x, 1).wait()
        tp.send_tensor_dict({"x": x, "n": 1}, 1)
    else:
        tp.irecv(x.shape, x.dtype, 0).wait()
        tp.recv_tensor_dict(0)
    tp.broadcast_object({"n": 1} if rank == 0 else None)
    tp.barrier()


def make_and_leave(rank: int, n: int, folder: str, hosts: Any) -> tuple[int, int]:
    """The bytes of shared memory that stay mapped, and the objects that need a collector."""
    gc.collect()
    gc.disable()
    for turn in range(1 if hosts else 2):
        inside = Path(folder, str(turn))
        inside.mkdir(exist_ok=True)
        with groups_over(rank, n, str(inside), hosts) as groups:
            use(groups, rank)
            gc.collect()
            use(groups, rank)
            garbage = gc.collect()
        del groups
    assert not call_counts._entries
    return shared_bytes([os.getpid()]), garbage


def test_groups_and_operations_are_freed_without_a_collector(tmp_path: Path) -> None:
    assert run_ranks(2, make_and_leave, str(tmp_path), None) == [(0, 0), (0, 0)]


@pytest.mark.namespaces
def test_memory_of_groups_between_hosts_is_freed_without_a_collector(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        left = run_ranks(2, make_and_leave, str(tmp_path), hosts)
    assert [mapped for mapped, _ in left] == [0, 0]


# --- threads and forks ----------------------------------------------------------------------

CALLS: dict[str, Callable[[GroupCoordinator, int], Any]] = {
    "all_reduce": lambda group, given: group.all_reduce(torch.full((2000,), given)),
    "all_reduce of large tensors": lambda group, given: group.all_reduce(
        torch.full((900_000,), given)
    ),
    "objects": lambda group, given: group.all_gather_object(given),
    "dict": lambda group, given: group.broadcast_tensor_dict(
        {"is": given, "x": torch.ones(9999)} if group.rank_in_group == 0 else None
    ),
}


def both_call(rank: int, n: int, store: Store, call: str, torch_only: bool) -> list[str]:
    """Each thread calls with a number of its own; the errors that they have raised."""
    raised: list[str] = []
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30, torch_only=torch_only) as found:
        found.tp.barrier()

        def repeat(given: int) -> None:
            try:
                while True:
                    CALLS[call](found.tp, given)
            except (RuntimeError, CoordinatorError) as error:
                raised.append(str(error))

        threads = [threading.Thread(target=repeat, args=(given,)) for given in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return raised


@BOTH
@pytest.mark.parametrize("call", CALLS)
def test_collectives_of_two_threads_at_once_end_the_group(call: str, torch_only: bool) -> None:
    for raised in run_ranks(2, both_call, SharedStore(), call, torch_only):
        assert len(raised) == 2
        if call.startswith("all_reduce"):  # the others are of several parts, which may differ
            assert all("another thread is in a call of this group" in each for each in raised)


def meddle(under_way: Work[Any], folder: Path) -> None:
    """Wait for an operation of the parent, which is stopped meanwhile."""
    os.kill(os.getppid(), signal.SIGSTOP)
    try:
        (folder / "stopped").touch()
        until((folder / "sent").exists, "rank 1 has sent nothing")
        under_way.is_completed()
        with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
            under_way.wait()
    finally:
        os.kill(os.getppid(), signal.SIGCONT)


def pretend(groups: coordinator.ParallelGroups) -> None:
    tp, x = groups.tp, torch.ones(4)
    for call in (
        lambda: tp.all_reduce(x),
        lambda: tp.all_reduce(x, async_op=True),
        lambda: tp.barrier(),
        lambda: tp.send(x, 1),
        lambda: tp.isend_tensor_dict({"x": x}, 1),
        lambda: tp.broadcast_object("a child's"),
        lambda: tp.abort("a child's"),
    ):
        with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
            call()
    groups.close()


def fork(rank: int, n: int, store: Store, folder: Path, torch_only: bool) -> list[float]:
    with coordinator.init(tp=n, rank=rank, store=store, torch_only=torch_only) as groups:
        tp, x = groups.tp, torch.full((4,), float(rank))
        sums = [tp.all_reduce(x)[0].item()]
        tp.send(x, 1) if rank == 0 else tp.recv(x.shape, x.dtype, 0)
        all_here(store, n)
        if rank == 0:
            under_way = tp.irecv(x.shape, x.dtype, 1)
            in_a_child(lambda: meddle(under_way, folder))
            in_a_child(lambda: pretend(groups))
            found = under_way.wait()
            assert found is not None
            sums.append(found[0].item())
        else:
            until((folder / "stopped").exists, "rank 0 has forked no child")
            sent = tp.isend(x + 2, 0)
            (folder / "sent").touch()
            sent.wait()
        sums += [tp.all_reduce(x)[0].item(), tp.broadcast_object(rank if rank == 0 else None)]
        tp.send(x + 5, 1) if rank == 0 else sums.append(tp.recv(x.shape, x.dtype, 0)[0].item())
        tp.barrier()
        return sums


@BOTH
def test_a_forked_child_takes_no_part_and_its_parent_goes_on(
    torch_only: bool, tmp_path: Path
) -> None:
    assert run_ranks(2, fork, SharedStore(), tmp_path, torch_only) == [[1, 3, 1, 0], [1, 1, 0, 5]]
