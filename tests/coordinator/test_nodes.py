"""Nodes: members that share a host, found by attaching; hierarchical verbs over them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore, Store

import coordinator
import coordinator.groups
import coordinator.hosts
from coordinator import ParallelGroups, ReduceOp, host_store
from coordinator.hosts import Heartbeat, HostTopology, find_nodes
from coordinator.rendezvous import Rendezvous
from shm_broadcast import Board, Deadline, SharedMemoryError
from tests.ranks import run_ranks
from tests.refused_threads import refusing_threads
from tests.shared_store import SharedStore


def members(n: int) -> list[HostTopology]:
    """The nodes that each of ``n`` members finds; a thread is a member."""
    store = HashStore()

    def find(rank: int) -> HostTopology:
        return find_nodes(Rendezvous(store, rank, n, "group", Deadline.after(10)))

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(find, range(n)))


@pytest.mark.quick
def test_hosts_that_cannot_see_each_other_are_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine, one boot id, but members 0, 3 and 1, 2, 4 are isolated from each other."""
    sides = {0: "a", 3: "a", 1: "b", 2: "b", 4: "b"}
    owners: dict[bytes, int] = {}

    class Isolated(Board):
        @classmethod
        def create(cls, n_members, member=0, *named, **options):  # type: ignore[no-untyped-def]
            board = Board.create(n_members, member, *named, **options)
            owners[board.handle().segment.nonce] = member
            return board

        @classmethod
        def attach(cls, handle, member):  # type: ignore[no-untyped-def]
            if sides[owners[handle.segment.nonce]] != sides[member]:
                raise SharedMemoryError("another pid namespace")
            return Board.attach(handle, member)

    monkeypatch.setattr(coordinator.hosts, "Board", Isolated)
    found = members(5)
    assert [each.node_of for each in found] == [(0, 1, 1, 0, 1)] * 5
    assert found[2].all() == [[0, 3], [1, 2, 4]]
    for each in found:
        each.close()


def test_a_heartbeat_without_a_thread_is_an_error_and_can_be_closed() -> None:
    with Board.create(2, 0) as board:
        hosts = {"a": [0], "b": [1]}
        exchange = Rendezvous(host_store(), 0, 2, "world", Deadline.after(30))
        heartbeat = Heartbeat(exchange, board, hosts, "a")
        with refusing_threads("heartbeat"), pytest.raises(RuntimeError, match="new thread"):
            heartbeat.start()
        heartbeat.close()


# --- hierarchical verbs; on one machine, nodes are made up ---------------------------------


def init_on_nodes(rank: int, n: int, store: Store, node_of: tuple[int, ...]) -> ParallelGroups:
    """All ranks share a board, and take themselves for ranks of several nodes."""
    coordinator.groups.find_nodes = lambda *given: replace(  # type: ignore[attr-defined]
        find_nodes(*given), node_of=node_of
    )
    return coordinator.init(tp=n, rank=rank, store=store, timeout=30, operation_timeout=20)


def two_and_two(rank: int, n: int, store: Store) -> None:
    with init_on_nodes(rank, n, store, (0, 0, 2, 2)) as groups:
        world = groups.world.hierarchy.world
        intra, inter = groups.world.hierarchy.intra, groups.world.hierarchy.inter
        assert world is groups.world
        assert intra.ranks == ([0, 1] if rank < 2 else [2, 3])
        assert (inter.ranks if inter else None) == ([0, 2] if rank in (0, 2) else None)
        x = torch.tensor([rank + 1, 3 * rank + 2])
        before = x.clone()
        for op, expected in {
            ReduceOp.SUM: [10, 26],
            ReduceOp.PRODUCT: [24, 880],
            ReduceOp.MIN: [1, 2],
            ReduceOp.MAX: [4, 11],
            ReduceOp.BOR: [7, 15],
            ReduceOp.BXOR: [4, 4],
        }.items():
            assert world.all_reduce(x, op=op, hierarchical=True).tolist() == expected
        out = torch.empty(2)
        assert world.all_reduce(x.float(), op=ReduceOp.AVG, hierarchical=True, out=out) is out
        assert out.tolist() == [2.5, 6.5]
        leaf = torch.zeros(2, requires_grad=True)
        assert world.all_reduce(x.float(), hierarchical=True, out=leaf) is leaf
        assert leaf.tolist() == [10.0, 26.0]
        for dtype in (torch.float16, torch.bfloat16):
            large = torch.tensor([40000.0, 1.0], dtype=dtype)
            average = world.all_reduce(large, op=ReduceOp.AVG, hierarchical=True)
            assert average.dtype == dtype
            assert torch.equal(average, large)
        with pytest.raises(TypeError, match="out is"):
            world.all_reduce(x, hierarchical=True, out=torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ValueError, match="out has shape"):
            world.all_reduce(x, hierarchical=True, out=torch.zeros(3, 2, dtype=torch.int64))
        work = world.all_reduce(x, hierarchical=True, async_op=True)
        assert work.wait().tolist() == [10, 26]
        assert torch.equal(x, before)
        messy = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        results = world.all_gather_object(world.all_reduce(messy, hierarchical=True).tolist())
        assert all(result == results[0] for result in results)
        with pytest.raises(TypeError):
            world.all_reduce(x, op=ReduceOp.AVG, hierarchical=True)
        world.barrier()


def three_and_one(rank: int, n: int, store: Store) -> None:
    """Of {1, 2, 3}, {10} the average is 4, not that of the nodes' averages, 6, as Bagua's."""
    with init_on_nodes(rank, n, store, (0, 0, 0, 3)) as groups:
        value = torch.tensor([1.0, 2.0, 3.0, 10.0][rank])
        average = groups.world.all_reduce(value, op=ReduceOp.AVG, hierarchical=True)
        assert average.item() == 4
        assert groups.tp.hierarchy.intra.world_size == (1 if rank == 3 else 3)
        groups.world.barrier()


def one_each(rank: int, n: int, store: Store) -> None:
    with init_on_nodes(rank, n, store, (0, 1)) as groups:
        assert groups.world.hierarchy.inter is groups.world
        assert groups.world.hierarchy.intra.ranks == [rank]
        assert groups.world.all_reduce(torch.ones(2), hierarchical=True).tolist() == [2, 2]
        groups.world.barrier()


def one_node(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        hierarchy = groups.tp.hierarchy
        assert hierarchy.intra is groups.tp
        assert (hierarchy.inter.ranks if hierarchy.inter else None) == ([0] if rank == 0 else None)
        average = groups.tp.all_reduce(
            torch.tensor([float(rank)]), op=ReduceOp.AVG, hierarchical=True
        )
        assert average.item() == 0.5
        # a communicator knows of no nodes: to it, all ranks are on one
        comm, x = groups.tp.device_communicator, torch.ones(3)
        assert comm.all_reduce(x, hierarchical=True).tolist() == [2, 2, 2]
        work = comm.all_reduce(x, hierarchical=True, async_op=True, timeout=30.0)
        assert work.wait().tolist() == [2, 2, 2]
        # and the arguments that vLLM's users give by position are taken from communicators, too
        assert comm.all_gather(x, 0).tolist() == groups.tp.all_gather(x, 0).tolist()
        groups.world.barrier()


@pytest.mark.parametrize(
    ("n", "body"), [(4, two_and_two), (4, three_and_one), (2, one_each), (2, one_node)]
)
def test_hierarchical_reductions(n: int, body: Callable[..., object]) -> None:
    run_ranks(n, body, SharedStore())
