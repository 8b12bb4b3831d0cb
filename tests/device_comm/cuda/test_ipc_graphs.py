"""Captured collectives: recorded launches, replayed, with the input changed in between."""

from __future__ import annotations

import contextlib
import re
import struct
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.driver import DeviceError, IpcUnavailableError
from device_comm.cuda.ipc import mappings
from device_comm.cuda.ipc.abi import GROUP_BYTES
from device_comm.cuda.ipc.mappings import GraphBufferRegistry, Mappings
from shm_broadcast import (
    BoardHandle,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)
from tests.device_comm.cuda.ipc_ranks import (
    HostDriver,
    HostGraph,
    ipc_of,
    local_swaps,
    make_ipc,
    on_threads,
    run_local,
)
from tests.device_comm.meeting import die, meet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from device_comm import Communicator

    Run = Callable[..., list[Any]]

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


def test_graphs_are_replayed_among_eager_calls(run_ipc: Run) -> None:
    assert run_ipc(3, capture_and_replay, "") == [()] * 3


def test_memory_that_cannot_be_shared_is_staged_on_all_ranks(run_ipc: Run) -> None:
    reasons = run_ipc(2, capture_and_replay, "expandable segments")
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


def test_freed_memory_of_graphs_does_not_stay_mapped(run_ipc: Run) -> None:
    mapped = run_ipc(3, capture_anew)
    assert mapped == [[4] * 5] * 3, "the regions of two peers, and what two have captured last"


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


def test_check_raises_after_replays_without_a_lost_rank(run_ipc: Run) -> None:
    said = run_ipc(3, replay_on, may_die={2})
    assert all("rank 2" in text for texts in said[:2] for text in texts), said


# --- on ranks that are threads -----------------------------------------------------------


def test_a_captured_message_goes_beside_others(emulation_library: Path) -> None:
    """A message is under way, and waits for its receiver, while a graph sends another one."""

    def body(comm: Communicator, driver: HostDriver) -> list[float]:
        captured = driver.tensor((100_000,), torch.float32)
        with comm.graph_capture(), driver.capture() as graph:
            comm.send(captured, 1) if comm.rank == 0 else comm.recv(out=captured, src=0)
        if comm.rank == 0:
            captured.fill_(3)
            work = comm.isend(torch.full((200_000,), 7.0), 1)
            graph.replay()
            work.wait()
            comm.flush()
            return []
        graph.replay()
        other = comm.recv((200_000,), torch.float32, 0)
        return [*captured.unique().tolist(), *other.unique().tolist()]

    assert run_local(emulation_library, 2, body) == [[], [3.0, 7.0]]


@pytest.mark.parametrize("how", ["on all ranks", "on rank 0", "error"])
def test_nested_captures_end_with_the_outermost(emulation_library: Path, how: str) -> None:
    def body(comm: Communicator, driver: HostDriver) -> str:
        x = driver.tensor((1000,), torch.float32)
        nests = how != "on rank 0" or comm.rank == 0
        inner = comm.graph_capture() if nests else contextlib.nullcontext()
        try:
            with comm.graph_capture():
                with contextlib.suppress(KeyError), inner:
                    with driver.capture() as graph:
                        total = comm.all_reduce(x)
                    if how == "error" and comm.rank == 1:
                        raise KeyError("of mine")
                with driver.capture() as after:
                    largest = comm.all_reduce(x, op=ReduceOp.MAX)
        except DivergenceError as error:
            return str(error)
        x.fill_(comm.rank + 1)
        graph.replay()
        after.replay()
        comm.flush()
        assert ipc_of(comm).reasons == ()
        return f"{total.unique().tolist()} {largest.unique().tolist()}"

    expected = "ended its capture with an error" if how == "error" else "[3.0] [2.0]"
    said = run_local(emulation_library, 2, body)
    assert all(expected in each for each in said), said


@pytest.mark.parametrize(
    ("how", "ours", "theirs"),
    [
        ("memory", "rank 1 issued .*, staged where", "rank 0 issued .* where .*, staged"),
        ("count", "rank 1 issued all_reduce of 4000 bytes", "issued nothing where"),
        ("freed", "rank 1 issued memory at .* cannot be shared: not allocated", "not allocated by"),
        ("error", "rank 1 issued ended its capture with an error", "KeyError: 'of mine'"),
    ],
)
def test_different_captures_raise_and_are_forgotten(
    how: str, ours: str, theirs: str, emulation_library: Path
) -> None:
    def body(comm: Communicator, driver: HostDriver) -> str:
        pointer = driver.allocate(4000)
        x = driver.view(pointer, (1000,), torch.float32)
        if how == "memory" and comm.rank == 1:
            x = torch.zeros(1000)
        calls = 2 if how == "count" and comm.rank == 1 else 1
        try:
            with comm.graph_capture():
                with driver.capture():
                    for _ in range(calls):
                        comm.all_reduce(x)
                if how == "error" and comm.rank == 1:
                    raise KeyError("of mine")
                if how == "freed" and comm.rank == 1:
                    del x
                    driver.free(pointer)
        except (DivergenceError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"
        comm.all_reduce(torch.ones(3))
        with comm.graph_capture():
            captured = Captured(comm, driver, 500)
        captured.replay(1)
        return said

    first, second = run_local(emulation_library, 2, body)
    assert re.search(ours, first), first
    assert re.search(theirs, second), second


# --- tables of captured memory, on a device that launches nothing ------------------------


class Rank:
    def __init__(self, rank: int, swap: Callable[[bytes], list[bytes]]) -> None:
        self.driver = HostDriver(None, f"device {rank}")
        self.registry = GraphBufferRegistry(self.driver, Mappings(self.driver), rank, swap)
        self.x = self.driver.tensor((64,), torch.float32)


def ranks_of(n: int) -> list[Rank]:
    return [Rank(rank, swap) for rank, swap in enumerate(local_swaps(n))]


def test_outside_of_a_capture_everything_is_staged(caplog: pytest.LogCaptureFixture) -> None:
    rank = ranks_of(2)[0]
    for _ in range(3):
        assert rank.registry.reserve("all_reduce", rank.x.data_ptr()) == 0
    said = ["captured collectives copy their inputs: a capture outside of graph_capture()"]
    assert caplog.messages == said, "once"
    assert rank.registry.reasons == ["a capture outside of graph_capture()"]


def test_more_collectives_than_tables_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "ENTRIES", 4)
    ranks = ranks_of(2)

    def body(rank: int) -> list[bool]:
        mine, given = ranks[rank], []
        for count in (3, 5, 4):
            mine.registry.begin()
            given += [
                mine.registry.reserve("all_reduce", mine.x.data_ptr()) > 0 for _ in range(count)
            ]
            mine.registry.finish()
        return given

    first, second = on_threads(2, body)
    assert first == second == [True] * 3 + [True] * 4 + [False] + [True] * 4
    assert ranks[0].registry.reasons == ["more than 4 collectives captured at once"]


SENDS_4, RECVS_NONE = "sends of [4] bytes", "receives of [] bytes"


@pytest.mark.parametrize(
    ("issued", "said"),
    [
        (
            [[("send", 1, 4)], [], []],
            [
                f"rank 1 issued {RECVS_NONE} where this rank issued {SENDS_4}",
                f"rank 0 issued {SENDS_4} where this rank issued {RECVS_NONE}",
                f"rank 1 issued {RECVS_NONE} where this rank issued nothing, and another rank "
                + SENDS_4,
            ],
        ),
        (
            [[("send", 1, 4), ("send", 1, 8)], [("recv", 0, 8), ("recv", 0, 4)]],
            ["rank 1 issued receives of [8, 4] bytes", "rank 0 issued sends of [4, 8] bytes"],
        ),
        (
            [[("recv", 1, 4)], [("send", 0, 8)]],
            ["rank 1 issued sends of [8] bytes", "rank 0 issued receives of [4] bytes"],
        ),
    ],
)
def test_messages_without_their_other_ends_are_refused(
    issued: list[list[tuple[str, int, int]]], said: list[str]
) -> None:
    ranks = ranks_of(len(issued))

    def body(rank: int) -> str:
        registry = ranks[rank].registry
        registry.begin()
        for message in issued[rank]:
            registry.note_message(*message)
        with pytest.raises(DivergenceError) as caught:
            registry.finish()
        registry.begin()
        if rank < 2:
            registry.note_message(("send", "recv")[rank], 1 - rank, 4)
        registry.finish()
        return str(caught.value)

    found = on_threads(len(issued), body)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("allocate", DeviceError("cudaMalloc", "out of memory")),
        ("allocate", MemoryError("out of memory")),
        ("reach", ValueError("no way")),
    ],
)
def test_what_one_rank_cannot_do_is_refused_on_all(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    monkeypatch.setattr(ranks[0].driver, call, Mock(side_effect=error))

    def capture(mine: Rank) -> None:
        mine.registry.begin()
        mine.registry.reserve("all_reduce", mine.x.data_ptr())
        mine.registry.finish()

    def body(rank: int) -> str:
        with pytest.raises(IpcUnavailableError) as caught:
            capture(ranks[rank])
        return str(caught.value)

    assert on_threads(2, body) == [f"rank 0 cannot use its peers' device memory: {error}"] * 2
