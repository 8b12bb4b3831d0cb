"""What can be said of symmetric memory without devices that share a switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from device_comm.cuda.driver import DeviceError
from device_comm.cuda.symmetric_backend import SymmetricBackend
from device_comm.operation import ReduceOp
from tests.device_comm.cuda.fake_switch import switched
from tests.device_comm.cuda.ipc_ranks import on_threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there may be a switch")
def test_without_a_switch_it_is_refused_with_the_reason() -> None:
    refused = r"symmetric memory: (cuda:0 has no multicast|RuntimeError: .*cuDeviceGet)"
    with pytest.raises(DeviceError, match=refused):
        SymmetricBackend.allocate(torch.device("cuda", 0))


class SomeGroup:
    group_name = "0"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    "error", [RuntimeError("no\nand a trace"), TypeError("no"), AttributeError("no")]
)
def test_whatever_torch_raises_is_an_error_that_all_ranks_get(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(_symmetric_memory, "rendezvous", refuse)
    group: Any = SomeGroup()
    with pytest.raises(DeviceError, match=rf"rendezvous: {type(error).__name__}: no$"):
        SymmetricBackend(group, torch.empty(16, dtype=torch.uint8))


def test_torch_has_the_operation() -> None:
    schema = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]


# --- over a switch of the host -----------------------------------------------------------

LIMIT = 4096
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 1000)


def numbers(rank: int, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones, whose sums are exact; others each time, so that what is left over is seen."""
    return ((torch.arange(count) + 3 * rank + 5 * turn) % 7 + rank).to(dtype)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_switch_adds_what_all_ranks_have_given(n: int, dtype: torch.dtype) -> None:
    counts = (*COUNTS, LIMIT // dtype.itemsize)

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

    with switched(n, LIMIT) as (switch, make):
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

    with switched(2, LIMIT) as (_, make):
        on_threads(2, body)


def test_what_the_switch_does_not_add_is_refused_before_anybody_waits() -> None:
    with switched(2, LIMIT) as (switch, make), make(0) as comm:
        for wrong, op in (
            (torch.ones(LIMIT // 4 + 1), ReduceOp.SUM),
            (torch.ones(4, dtype=torch.float16), ReduceOp.SUM),
            (torch.ones(4, dtype=torch.int32), ReduceOp.SUM),
            (torch.ones(4), ReduceOp.MAX),
        ):
            with pytest.raises(NotImplementedError, match=f"tp all_reduce: no {op.name} of"):
                comm.all_reduce(wrong, op=op)
        assert switch.asked == [[], []]
