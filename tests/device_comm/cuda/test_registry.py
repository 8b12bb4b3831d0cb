"""Tables of captured memory, on a device that launches nothing: two ranks as threads."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch

from device_comm.cuda.driver import DeviceError, IpcUnavailableError
from device_comm.cuda.ipc import mappings as graph
from device_comm.cuda.ipc.mappings import GraphBufferRegistry, Mappings
from shm_broadcast import DivergenceError
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import local_swaps, on_threads

if TYPE_CHECKING:
    from collections.abc import Callable


class Rank:
    def __init__(self, rank: int, swap: Callable[[bytes], list[bytes]]) -> None:
        self.driver = HostDriver(None, f"device {rank}")
        self.registry = GraphBufferRegistry(self.driver, Mappings(self.driver), rank, swap)
        self.x = self.driver.tensor((64,), torch.float32)

    def row(self, table: int) -> tuple[int, ...]:
        return struct.unpack("<8Q", self.driver.read(table, 64))


def two() -> list[Rank]:
    return [Rank(rank, swap) for rank, swap in enumerate(local_swaps(2))]


def test_tables_hold_the_address_of_each_rank() -> None:
    ranks = two()

    def body(rank: int) -> list[tuple[int, ...]]:
        mine = ranks[rank]
        tables = []
        for count in (3, 0, 2):
            mine.registry.begin()
            tables += [
                mine.registry.reserve("all_reduce", mine.x.data_ptr() + 4 * index)
                for index in range(count)
            ]
            mine.registry.finish()
        assert len(set(tables)) == 5
        return [mine.row(table) for table in tables]

    first, second = on_threads(2, body)
    a, b = (each.x.data_ptr() for each in ranks)
    expected = [(a + 4 * i, b + 4 * i, 0, 0, 0, 0, 0, 0) for i in (0, 1, 2, 0, 1)]
    assert first == second == expected
    assert ranks[0].driver.reached == ["device 1"]
    for each in ranks:
        assert each.registry.reasons == []
        each.registry.close()


def test_outside_of_a_capture_everything_is_staged(caplog: pytest.LogCaptureFixture) -> None:
    rank = two()[0]
    for _ in range(3):
        assert rank.registry.reserve("all_reduce", rank.x.data_ptr()) == 0
    said = ["captured collectives copy their inputs: a capture outside of graph_capture()"]
    assert caplog.messages == said, "once"
    assert rank.registry.reasons == ["a capture outside of graph_capture()"]


def test_a_full_block_and_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ENTRIES", 4)
    ranks = two()

    def body(rank: int) -> list[bool]:
        mine = ranks[rank]
        given = []
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


def test_a_failed_capture_is_forgotten() -> None:
    ranks = two()

    def body(rank: int) -> tuple[int, ...]:
        mine = ranks[rank]
        mine.registry.begin()
        mine.registry.reserve("all_reduce", mine.x.data_ptr())
        if rank == 0:
            mine.registry.finish(failed=True)
        else:
            with pytest.raises(DivergenceError, match="rank 0 issued ended its capture"):
                mine.registry.finish()
        mine.registry.begin()
        table = mine.registry.reserve("all_reduce", mine.x.data_ptr())
        mine.registry.finish()
        return mine.row(table)[:2]

    assert on_threads(2, body) == [tuple(each.x.data_ptr() for each in ranks)] * 2


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "said"),
    [
        ([("send", 4)], [], "sends of [4] bytes where this rank issued receives of [] bytes"),
        ([("recv", 4)], [("send", 8)], "receives of [4] bytes where this rank issued sends of [8]"),
        ([("send", 4), ("send", 8)], [("recv", 8), ("recv", 4)], "sends of [4, 8] bytes where"),
    ],
)
def test_messages_without_their_other_ends_are_refused(
    of_rank_0: list[tuple[str, int]], of_rank_1: list[tuple[str, int]], said: str
) -> None:
    ranks = two()

    def body(rank: int) -> str:
        registry = ranks[rank].registry
        registry.begin()
        for verb, size in (of_rank_0, of_rank_1)[rank]:
            registry.note_message(verb, 1 - rank, size)
        with pytest.raises(DivergenceError) as caught:
            registry.finish()
        registry.begin()
        registry.note_message(("send", "recv")[rank], 1 - rank, 4)
        registry.finish()
        return str(caught.value)

    first, second = on_threads(2, body)
    assert first.startswith("rank 1 issued ")
    assert second.startswith(f"rank 0 issued {said}")


def test_memory_that_is_gone_at_the_end_of_the_capture() -> None:
    ranks = two()

    def body(rank: int) -> str:
        mine = ranks[rank]
        mine.registry.begin()
        pointer = mine.driver.allocate(64)
        assert mine.registry.reserve("all_reduce", pointer)
        if rank == 1:
            mine.driver.free(pointer)
        with pytest.raises(DivergenceError) as caught:
            mine.registry.finish()
        return str(caught.value)

    first, second = on_threads(2, body)
    assert "rank 1 issued memory at" in first
    assert "cannot be shared: not allocated by this driver" in first
    assert "not allocated by this driver" in second


def test_memory_that_a_peer_cannot_map_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = two()

    def body(rank: int) -> str:
        mine = ranks[rank]
        if rank == 0:
            monkeypatch.setattr(mine.driver, "reach", _refuse)
        mine.registry.begin()
        mine.registry.reserve("all_reduce", mine.x.data_ptr())
        with pytest.raises(IpcUnavailableError) as caught:
            mine.registry.finish()
        return str(caught.value)

    assert on_threads(2, body) == ["rank 0 cannot use its peers' device memory: no way"] * 2


def _refuse(identity: str) -> None:
    raise ValueError("no way")


def test_a_message_without_its_other_end_is_told_to_those_it_does_not_concern() -> None:
    ranks = [Rank(rank, swap) for rank, swap in enumerate(local_swaps(3))]

    def body(rank: int) -> str:
        registry = ranks[rank].registry
        registry.begin()
        if rank == 0:
            registry.note_message("send", 1, 4)
        with pytest.raises(DivergenceError) as caught:
            registry.finish()
        return str(caught.value)

    assert on_threads(3, body) == [
        "rank 1 issued receives of [] bytes where this rank issued sends of [4] bytes",
        "rank 0 issued sends of [4] bytes where this rank issued receives of [] bytes",
        "rank 1 issued receives of [] bytes where this rank issued nothing, and another rank sends "
        "of [4] bytes",
    ]


@pytest.mark.parametrize("error", [DeviceError("cudaMalloc", "out of memory"), MemoryError()])
def test_a_rank_that_cannot_begin_is_told_to_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = two()
    monkeypatch.setattr(ranks[0].driver, "allocate", Mock(side_effect=error))

    def body(rank: int) -> str:
        with pytest.raises(IpcUnavailableError) as caught:
            ranks[rank].registry.begin()
        return str(caught.value)

    first, second = on_threads(2, body)
    assert first == second
    assert "rank 0" in first
