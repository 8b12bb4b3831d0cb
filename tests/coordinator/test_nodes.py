"""Which members share a host: found by attaching, never by arithmetic."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

import coordinator.hosts
from coordinator import host_store
from coordinator.hosts import Heartbeat, HostTopology, find_nodes
from coordinator.rendezvous import Rendezvous
from shm_broadcast import Board, Deadline, PeerProtocolError, SharedMemoryError
from shm_broadcast.executor import ProgressEngine
from tests.coordinator.test_exchange import members
from tests.refused_threads import refusing_threads


def close(found: list[object]) -> None:
    for each in found:
        assert isinstance(each, HostTopology)
        each.close()


def test_members_of_one_host_share_a_board() -> None:
    found = members(3, find_nodes)
    assert [each.node_of for each in found] == [(0, 0, 0)] * 3  # type: ignore[attr-defined]
    assert [each.board.member for each in found] == [0, 1, 2]  # type: ignore[attr-defined]
    assert found[0].all() == [[0, 1, 2]]  # type: ignore[attr-defined]
    close(found)


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
    found = members(5, find_nodes)
    assert [each.node_of for each in found] == [(0, 1, 1, 0, 1)] * 5  # type: ignore[attr-defined]
    assert found[2].all() == [[0, 3], [1, 2, 4]]  # type: ignore[attr-defined]
    close(found)


def test_a_given_board_is_used() -> None:
    """A launcher gives each of its two nodes a board; both have slots for all ranks."""
    first, second = Board.create(4, 0), Board.create(4, 2)
    boards = [first, Board.attach(first.handle(), 1), second, Board.attach(second.handle(), 3)]

    def body(exchange: Rendezvous) -> HostTopology:
        return find_nodes(exchange, boards[exchange.rank])

    found = members(4, body)
    assert [each.node_of for each in found] == [(0, 0, 2, 2)] * 4  # type: ignore[attr-defined]
    assert [each.board for each in found] == boards  # type: ignore[attr-defined]
    close(found)


def test_nodes_of_a_subgroup() -> None:
    with Board.create(6) as board:
        world = HostTopology(
            board, (0, 1, 2, 3, 4, 5), (0, 0, 2, 2, 2, 5), ProgressEngine(board), ExitStack()
        )
        some = world.sub([5, 3, 1, 2])
        assert some.members == (5, 3, 1, 2)
        assert some.node_of == (0, 1, 2, 1)
        assert some.all() == [[0], [1, 3], [2]]


def test_a_board_that_is_none_blames_whoever_offered_it() -> None:
    store = HashStore()
    boot_id = coordinator.hosts._BOOT_ID.read_bytes()
    for what, said in (("host", boot_id), ("boards", b"\xc1")):
        store.set(f"{what}/0", b"2 " + said)
        store.add(f"{what}/count", 1)
    exchange = Rendezvous(store, 1, 2, "world", Deadline.after(30))
    with pytest.raises(PeerProtocolError, match=r"world.* 0"):
        find_nodes(exchange)


def test_a_heartbeat_that_has_no_thread_says_so_and_can_be_closed() -> None:
    with Board.create(2, 0) as board:
        hosts = {"a": [0], "b": [1]}
        exchange = Rendezvous(host_store(), 0, 2, "world", Deadline.after(30))
        heartbeat = Heartbeat(exchange, board, hosts, "a")
        with refusing_threads("heartbeat"), pytest.raises(RuntimeError, match="new thread"):
            heartbeat.start()
        heartbeat.close()
