"""Captured collectives: recorded launches, replayed, with the input changed in between."""

from __future__ import annotations

import contextlib
import re
import struct
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import GROUP_BYTES
from shm_broadcast import (
    BoardHandle,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)
from tests.device_comm.cuda.host_driver import HostDriver, HostGraph
from tests.device_comm.cuda.ipc_ranks import ipc_of, make_ipc
from tests.device_comm.meeting import die, meet
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Communicator

SIZES = [1, 100, 700, 5_000, 40_001]
"""Numbers: in packets, in one shot, in two, and more than the staging holds."""

WITH_TABLES = 5 + 5 + 3 + 3
"""All gathers and scatters, and the reductions neither in packets nor in place in one shot."""


class Captured:
    """A graph of an all-reduce, an all-gather and a reduce-scatter of one size."""

    def __init__(self, comm: Communicator, driver: HostDriver, numel: int) -> None:
        self.comm = comm
        n = comm.world_size
        self.x = driver.tensor((numel,), torch.float32)
        self.wide = driver.tensor((n * numel,), torch.float32)
        with driver.capture() as graph:
            self.sum = comm.all_reduce(self.x)
            self.all = comm.all_gather(self.x, dim=0)
            self.part = comm.reduce_scatter(self.wide, dim=0)
            comm.all_reduce_(self.wide)
        self.graph: HostGraph = graph
        self.tables = {struct.unpack_from("<Q", job, GROUP_BYTES)[0] for *_, job in graph.launches}

    def replay(self, turn: int) -> None:
        """With new input; check the results."""
        n, rank, numel = self.comm.world_size, self.comm.rank, self.x.numel()
        numbers = torch.arange(numel, dtype=torch.float32) % 97 + turn
        self.x.copy_(numbers * (rank + 1))
        blocks = torch.arange(n, dtype=torch.float32).repeat_interleave(numel)
        self.wide.copy_(blocks + rank + turn)
        for result in (self.sum, self.all, self.part):
            result.zero_()
        self.graph.replay()
        assert torch.equal(self.sum, numbers * (n * (n + 1) // 2))
        assert torch.equal(self.all, torch.cat([numbers * (r + 1) for r in range(n)]))
        total = n * blocks + n * (n - 1) // 2 + n * turn
        assert torch.equal(self.part, total[rank * numel : (rank + 1) * numel])
        assert torch.equal(self.wide, total)


def capture_and_replay(
    rank: int, n: int, library: str, path: str, board: BoardHandle, pool_reason: str
) -> tuple[str, ...]:
    driver = HostDriver(library)
    driver.pool_reason = pool_reason if rank == 0 else ""
    with make_ipc(rank, n, library, path, board, driver) as comm:
        eager = torch.full((3000,), float(rank))
        with comm.graph_capture():
            graphs = [Captured(comm, driver, numel) for numel in SIZES[::2]]
        with comm.graph_capture():
            graphs += [Captured(comm, driver, numel) for numel in SIZES[1::2]]
        for turn in range(4):
            for captured in graphs[turn % 2 :: 2] if turn < 2 else graphs:
                captured.replay(turn)
                assert comm.all_reduce(eager)[0] == n * (n - 1) // 2
        comm.flush()
        tables = set().union(*(each.tables for each in graphs)) - {0}
        assert len(tables) == (0 if pool_reason else WITH_TABLES)
        return ipc_of(comm).reasons


@pytest.mark.parametrize("n", [2, 4])
def test_many_graphs_of_many_sizes_among_eager_calls(
    n: int, emulation_library: str, store_path: str
) -> None:
    reasons = run_ranks(n, capture_and_replay, str(emulation_library), store_path, NEW_BOARD, "")
    assert reasons == [()] * n


def test_what_cannot_be_shared_is_staged_on_all_ranks(
    emulation_library: str, store_path: str
) -> None:
    reasons = run_ranks(
        2,
        capture_and_replay,
        str(emulation_library),
        store_path,
        NEW_BOARD,
        "expandable segments",
    )
    assert reasons == [("rank 0: expandable segments",)] * 2


def capture_anew(rank: int, n: int, library: str, path: str, board: BoardHandle) -> list[int]:
    driver = HostDriver(library)
    mapped = []
    with make_ipc(rank, n, library, path, board, driver) as comm:
        for turn in range(5):
            pointer = driver.allocate(4000)
            x = driver.view(pointer, (1000,), torch.float32)
            with comm.graph_capture(), driver.capture() as graph:
                total = comm.all_reduce(x)
            x.fill_(rank + turn)
            graph.replay()
            comm.flush()
            assert total.unique().tolist() == [n * turn + n * (n - 1) / 2]
            mapped.append(driver.mapped)
            comm.barrier()
            del x
            driver.free(pointer)
    return mapped


def test_memory_of_graphs_that_are_gone_does_not_stay_mapped(
    emulation_library: str, store_path: str
) -> None:
    mapped = run_ranks(3, capture_anew, str(emulation_library), store_path, NEW_BOARD)
    assert mapped == [[4] * 5] * 3, "the regions of two peers, and what two have captured last"


def message_beside(rank: int, n: int, library: str, path: str, board: BoardHandle) -> list[float]:
    """A message is under way, and waits for its receiver, while a graph sends another one."""
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        captured = driver.tensor((100_000,), torch.float32)
        with comm.graph_capture(), driver.capture() as graph:
            comm.send(captured, 1) if rank == 0 else comm.recv(out=captured, src=0)
        if rank == 0:
            captured.fill_(3)
            work = comm.isend(torch.full((200_000,), 7.0), 1)
            graph.replay()
            work.wait()
            comm.flush()
            return []
        graph.replay()
        other = comm.recv((200_000,), torch.float32, 0)
        return [*captured.unique().tolist(), *other.unique().tolist()]


def test_a_captured_message_goes_beside_others(emulation_library: str, store_path: str) -> None:
    found = run_ranks(2, message_beside, str(emulation_library), store_path, NEW_BOARD)
    assert found[1] == [3.0, 7.0]


def decode(comm: Communicator, graph: HostGraph) -> None:
    while True:
        graph.replay()
        comm.check()


def replay_on(rank: int, n: int, library: str, path: str, board: BoardHandle) -> list[str]:
    """As a decoding loop does, whose last rank dies."""
    driver = HostDriver(library)
    comm = make_ipc(rank, n, library, path, board, driver)
    x = driver.tensor((5_000,), torch.float32)
    with comm.graph_capture(), driver.capture() as graph:
        total = comm.all_reduce(x)
    for _ in range(3):
        graph.replay()
        comm.check()
    assert not total.any()
    meet(rank, n, path)
    if rank == n - 1:
        die(path)
    with pytest.raises((PeerLostError, GroupAbortedError)) as first:
        decode(comm, graph)
    graph.replay()
    with pytest.raises(GroupAbortedError) as later:
        comm.check()
    comm.close()
    with pytest.raises(GroupClosedError):
        comm.check()
    return [str(first.value), str(later.value)]


def test_who_checks_learns_that_replays_did_nothing(
    emulation_library: str, store_path: str
) -> None:
    said = run_ranks(3, replay_on, str(emulation_library), store_path, NEW_BOARD, may_die={2})
    assert all("rank 2" in text for texts in said[:2] for text in texts), said


def nested(rank: int, n: int, library: str, path: str, board: BoardHandle, how: str) -> str:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        x = driver.tensor((1000,), torch.float32)
        nests = how != "on rank 0" or rank == 0
        inner = comm.graph_capture() if nests else contextlib.nullcontext()
        try:
            with comm.graph_capture():
                with contextlib.suppress(KeyError), inner:
                    with driver.capture() as graph:
                        total = comm.all_reduce(x)
                    if how == "error" and rank == 1:
                        raise KeyError("of mine")
                with driver.capture() as after:
                    largest = comm.all_reduce(x, op=ReduceOp.MAX)
        except DivergenceError as error:
            return str(error)
        x.fill_(rank + 1)
        graph.replay()
        after.replay()
        comm.flush()
        assert ipc_of(comm).reasons == ()
        return f"{total.unique().tolist()} {largest.unique().tolist()}"


@pytest.mark.parametrize("how", ["on all ranks", "on rank 0"])
def test_nested_captures_end_with_the_outermost(
    emulation_library: str, store_path: str, how: str
) -> None:
    said = run_ranks(2, nested, str(emulation_library), store_path, NEW_BOARD, how)
    assert said == ["[3.0] [2.0]"] * 2


def test_an_error_in_a_nested_capture_is_known_at_the_end_of_the_outermost(
    emulation_library: str, store_path: str
) -> None:
    said = run_ranks(2, nested, str(emulation_library), store_path, NEW_BOARD, "error")
    assert all("ended its capture with an error" in each for each in said), said


def differ(rank: int, n: int, library: str, path: str, board: BoardHandle, how: str) -> str:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        x = driver.tensor((1000,), torch.float32)
        if how == "memory" and rank == 1:
            x = torch.zeros(1000)
        calls = 2 if how == "count" and rank == 1 else 1
        try:
            with comm.graph_capture():
                with driver.capture():
                    for _ in range(calls):
                        comm.all_reduce(x)
                if how == "error" and rank == 1:
                    raise KeyError("of mine")
        except (DivergenceError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"
        comm.all_reduce(torch.ones(3))
        with comm.graph_capture():
            Captured(comm, driver, 500)
        return said


@pytest.mark.parametrize(
    ("how", "ours", "theirs"),
    [
        ("memory", "rank 1 issued .*, staged where", "rank 0 issued .* where .*, staged"),
        ("count", "rank 1 issued all_reduce of 4000 bytes", "issued nothing where"),
        ("error", "rank 1 issued ended its capture with an error", "KeyError: 'of mine'"),
    ],
)
def test_different_captures_are_refused_at_their_end(
    how: str, ours: str, theirs: str, emulation_library: str, store_path: str
) -> None:
    said = run_ranks(2, differ, str(emulation_library), store_path, NEW_BOARD, how)
    assert re.search(ours, said[0]), said
    assert re.search(theirs, said[1]), said
