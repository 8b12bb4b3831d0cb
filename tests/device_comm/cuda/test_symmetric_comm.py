"""Sums by a switch, over symmetric memory of a switch that is made of threads of the host."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from device_comm import ALL_VERBS, Capabilities, Communicator, Operation, ReduceOp
from device_comm.cuda import symmetric_backend
from device_comm.cuda.driver import DeviceError
from device_comm.cuda.symmetric_backend import Staging, SymmetricBackend
from tests.device_comm.cuda.ipc_ranks import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

pytestmark = pytest.mark.quick

NAME = "the switch's group"
ALIGN = 16
GUARD = 0x5A
"""What lies behind each rank's memory."""
LIMIT = 4096


class Switch:
    """A switch that adds what lies in the memory of ``n`` ranks.

    It is as strict as the real one (torch's CUDASymmetricMemoryOps): whole 16 bytes at such
    addresses, in memory that was shared, at the same place on all ranks. As there each rank adds
    one part, once all have come, and returns once all parts are there.

    Attributes:
        asked: offset and bytes of each sum, as each rank asked for it.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self._all = [torch.full((LIMIT + ALIGN,), GUARD, dtype=torch.uint8) for _ in range(n)]
        self.shared = [each[:LIMIT] for each in self._all]
        self._meeting = threading.Barrier(n, timeout=20)

    def untouched(self) -> bool:
        """Whether nothing was written behind a rank's memory."""
        return all(bool((each[-ALIGN:] == GUARD).all()) for each in self._all)

    def add(self, x: Tensor, reduction: str, group: str) -> Tensor:
        """As `torch.ops.symm_mem.multimem_all_reduce_`."""
        assert (reduction, group) == ("sum", NAME)
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.is_contiguous()
        rank, offset = self._find(x)
        assert x.data_ptr() % ALIGN == 0
        assert x.nbytes % ALIGN == 0
        self.asked[rank].append((offset, x.nbytes))
        self._meeting.wait()
        assert len({asked[-1] for asked in self.asked}) == 1
        cells = x.nbytes // ALIGN
        mine = slice(cells * rank // self.n * ALIGN, cells * (rank + 1) // self.n * ALIGN)
        parts = [each[offset : offset + x.nbytes][mine].view(x.dtype) for each in self.shared]
        total = torch.stack([part.float() for part in parts]).sum(0).to(x.dtype)
        for part in parts:
            part.copy_(total)
        self._meeting.wait()
        return x

    def _find(self, x: Tensor) -> tuple[int, int]:
        """The rank and the offset of a tensor."""
        for rank, shared in enumerate(self.shared):
            offset = x.data_ptr() - shared.data_ptr()
            if offset >= 0 and offset + x.nbytes <= shared.nbytes:
                return rank, offset
        raise AssertionError("this memory was not shared")


class LoneStream:
    """The one stream of the CPU."""

    address = 1

    def current(self) -> LoneStream:
        return self

    def capturing(self) -> bool:
        return False


def group_of(rank: int, n: int) -> Any:
    return SimpleNamespace(group_name=NAME, rank=lambda: rank, size=lambda: n)


@contextmanager
def switched(n: int) -> Iterator[tuple[Switch, Callable[[int], Communicator]]]:
    """A switch, and what makes each rank's end of it; ranks are threads."""
    switch = Switch(n)
    handle = SimpleNamespace(multicast_ptr=1)

    def make(rank: int) -> Communicator:
        shared = switch.shared[rank]
        return Communicator(SymmetricBackend(group_of(rank, n), shared, name="tp", timeout=20.0))

    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        pytest.MonkeyPatch.context() as patch,
    ):
        library.impl("multimem_all_reduce_", switch.add, "CPU")
        patch.setattr(_symmetric_memory, "rendezvous", lambda *_: handle)
        patch.setattr(symmetric_backend, "CudaStreams", lambda _: LoneStream())
        yield switch, make


def numbers(rank: int, turn: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small ones, whose sums are exact; others each time, so that what is left over is seen."""
    return ((torch.arange(count) + 3 * rank + 5 * turn) % 7 + rank).to(dtype)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_switch_adds_the_numbers_of_all_ranks(n: int, dtype: torch.dtype) -> None:
    counts = (1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 1000, LIMIT // dtype.itemsize)

    def body(rank: int) -> None:
        with make(rank) as comm:
            for turn, count in enumerate(counts):
                mine = numbers(rank, turn, count, dtype)
                total = sum(numbers(other, turn, count, dtype) for other in range(n))
                before, out = mine.clone(), torch.full((count + 1,), 99.0, dtype=dtype)
                assert torch.equal(comm.all_reduce(mine, out=out[:count]), total)
                assert torch.equal(mine, before)
                assert out[count] == 99
                assert torch.equal(comm.all_reduce_(mine), total)

    with switched(n) as (switch, make):
        on_threads(n, body)
        assert switch.untouched()
        sizes = [-(-count * dtype.itemsize // 16) * 16 for count in counts for _ in range(2)]
        assert switch.asked == [[(0, size) for size in sizes]] * n


def test_rows_and_parts_of_tensors_are_added() -> None:
    def body(rank: int) -> None:
        with make(rank) as comm:
            whole = torch.arange(24.0).view(4, 6) + rank
            assert torch.equal(comm.all_reduce(whole), 2 * torch.arange(24.0).view(4, 6) + 1)
            assert torch.equal(comm.all_reduce(whole[:, 1]), 2 * torch.arange(1.0, 24, 6) + 1)
            assert torch.equal(comm.all_reduce_(whole[1:2]), whole[1:2])
            assert whole[1, 0] == 13

    with switched(2) as (_, make):
        on_threads(2, body)


def test_other_sums_are_refused_before_a_rank_waits() -> None:
    with switched(2) as (switch, make), make(0) as comm:
        for wrong, op in (
            (torch.ones(LIMIT // 4 + 1), ReduceOp.SUM),
            (torch.ones(4, dtype=torch.float16), ReduceOp.SUM),
            (torch.ones(4, dtype=torch.int32), ReduceOp.SUM),
            (torch.ones(4), ReduceOp.MAX),
        ):
            with pytest.raises(NotImplementedError, match=f"tp all_reduce: no {op.name} of"):
                comm.all_reduce(wrong, op=op)
        assert switch.asked == [[], []]


class NotedStreams:
    """The current one is ``now``, each time another object; notes which one is waited for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.now = 1
        self.captures = False

    def current(self) -> Any:
        address = self.now
        stream = SimpleNamespace(address=address, query=lambda: True)
        stream.mark = lambda: stream
        stream.stream_wait = lambda: self.notes.append(f"after {address}")
        return stream

    def capturing(self) -> bool:
        return self.captures

    def device(self) -> AbstractContextManager[object]:
        return nullcontext()


def test_sums_on_another_stream_wait_for_the_last_one() -> None:
    streams = NotedStreams()
    given, taken = torch.zeros(64, dtype=torch.uint8).chunk(2)
    staging = Staging(given, taken, streams)
    has = Capabilities("some", ALL_VERBS)

    def step(given: Tensor, taken: Tensor) -> None:
        streams.notes.append(f"{given.tolist()} on {streams.now}")
        torch.add(given, 1, out=taken)

    uses = ((1, False), (1, False), (2, False), (3, True), (2, False))
    for streams.now, streams.captures in uses:
        x, y = torch.tensor([3.0]), torch.zeros(1)
        staging.reduce(Operation("all_reduce", x, y), has, step)
        assert (x.tolist(), y.tolist()) == ([3.0], [4.0])
    used = [f"{[3.0, 0.0, 0.0, 0.0]} on {stream}" for stream, _ in uses]
    assert streams.notes == [*used[:2], "after 1", *used[2:]]


# --- without devices that share a switch -------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there may be a switch")
def test_without_a_switch_the_error_says_why() -> None:
    refused = r"symmetric memory: (cuda:0 has no multicast|RuntimeError: .*cuDeviceGet)"
    with pytest.raises(DeviceError, match=refused):
        SymmetricBackend.allocate(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "error", [RuntimeError("no\nand a trace"), TypeError("no"), AttributeError("no")]
)
def test_every_error_of_torch_is_an_error_of_the_device(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(_symmetric_memory, "rendezvous", refuse)
    with pytest.raises(DeviceError, match=rf"rendezvous: {type(error).__name__}: no$"):
        SymmetricBackend(group_of(0, 2), torch.empty(16, dtype=torch.uint8))


def test_torch_has_the_operation() -> None:
    schema = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]
