"""Shares of any sizes through shared memory: both ends in one process, against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_comm import Operation
from device_comm.shm.collectives import Collective, GroupMembership
from shm_broadcast import DivergenceError
from tests.device_comm.test_shm_steps import Ends, N

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

sizes = st.lists(st.integers(0, 700), min_size=N, max_size=N).filter(any)


def run(operation: Callable[[int], Operation]) -> None:
    """Carry out every rank's operation, one small step at a time."""
    ends = Ends()
    tasks = [
        Collective(
            ends.steps[rank],
            GroupMembership(ends.board, range(N), rank, ends.segment, ends.group),
            operation(rank),
        )
        for rank in range(N)
    ]
    done = [False] * N
    for _ in range(1000):
        for rank in range(N):
            done[rank] = done[rank] or tasks[rank].advance(0)
        if all(done):
            return
    raise AssertionError("they do not end")


def numbers(count: int, rank: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


@given(sizes)
@settings(deadline=None, max_examples=60)
def test_all_gatherv_of_any_sizes(parts: Sequence[int]) -> None:
    inputs = [numbers(size, rank) for rank, size in enumerate(parts)]
    outputs = [torch.zeros(sum(parts)) for _ in range(N)]
    run(lambda rank: Operation("all_gatherv", inputs[rank], outputs[rank], output_sizes=parts))
    for output in outputs:
        assert torch.equal(output, torch.cat(inputs))


@given(sizes)
@settings(deadline=None, max_examples=60)
def test_reduce_scatterv_of_any_sizes(parts: Sequence[int]) -> None:
    inputs = [numbers(sum(parts), rank) for rank in range(N)]
    outputs = [torch.zeros(size) for size in parts]
    run(lambda rank: Operation("reduce_scatterv", inputs[rank], outputs[rank], source_sizes=parts))
    for output, expected in zip(outputs, (inputs[0] + inputs[1]).split(list(parts)), strict=True):
        assert torch.equal(output, expected)


@given(st.lists(sizes, min_size=N, max_size=N))
@settings(deadline=None, max_examples=60)
def test_all_to_all_of_any_sizes(table: list[list[int]]) -> None:
    """``table[r][s]`` elements go from rank r to rank s."""
    inputs = [numbers(sum(row), rank) for rank, row in enumerate(table)]
    columns = [[row[rank] for row in table] for rank in range(N)]
    outputs = [torch.zeros(sum(column)) for column in columns]

    def exchange(rank: int) -> Operation:
        sizes = {"source_sizes": table[rank], "output_sizes": columns[rank]}
        return Operation("all_to_all", inputs[rank], outputs[rank], **sizes)

    run(exchange)
    cut = [x.split(row) for x, row in zip(inputs, table, strict=True)]
    for rank, output in enumerate(outputs):
        assert torch.equal(output, torch.cat([parts[rank] for parts in cut]))


@given(sizes, sizes)
@settings(deadline=None, max_examples=30)
def test_ranks_that_differ_about_any_sizes_use_no_data(ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    outputs = [torch.full((sum(each),), -1.0) for each in (ours, theirs)]

    def gather(rank: int) -> Operation:
        each = (ours, theirs)[rank]
        source = numbers(each[rank], rank)
        return Operation("all_gatherv", source, outputs[rank], output_sizes=each)

    with pytest.raises(DivergenceError, match="issued all_gatherv of"):
        run(gather)
    assert all(bool((output == -1).all()) for output in outputs)


def test_an_exchange_of_other_sizes_than_expected_uses_no_data() -> None:
    sizes = [([1, 2], [1, 3]), ([5, 1], [2, 1])]
    outputs = [torch.full((sum(received),), -1.0) for _, received in sizes]

    def exchange(rank: int) -> Operation:
        sent, received = sizes[rank]
        source = numbers(sum(sent), rank)
        return Operation(
            "all_to_all", source, outputs[rank], source_sizes=sent, output_sizes=received
        )

    with pytest.raises(DivergenceError) as caught:
        run(exchange)
    assert "all_to_all that receives 3 elements from that rank" in str(caught.value)
    assert "all_to_all that sends 5 elements to rank 0" in str(caught.value)
    assert bool((outputs[0] == -1).all())
