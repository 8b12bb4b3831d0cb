"""Operations as values, and reductions that are turned into movements."""

from __future__ import annotations

import pytest
import torch

from device_comm import Operation, ReduceOp
from device_comm.operation import NO_TENSOR
from device_comm.torch_backend import reduce_here

N = 3
RANK = 1


def test_the_deadline_is_made_when_it_is_asked_for() -> None:
    operation = Operation("barrier", timeout=5)
    assert operation.timeout == 5
    assert operation.deadline is operation.deadline
    assert operation.deadline.timeout == 5
    assert Operation("barrier").deadline.timeout is None


def test_equal_parts_need_no_sizes() -> None:
    x = torch.zeros(6)
    operation = Operation("all_to_all", x, x)
    assert operation.source_parts(N) == operation.output_parts(N) == (2, 2, 2)
    uneven = Operation("all_to_all", x, x, source_sizes=(1, 5, 0), output_sizes=(2, 0, 4))
    assert uneven.source_parts(N) == (1, 5, 0)
    assert uneven.output_parts(N) == (2, 0, 4)


def test_the_buffer_of_a_broadcast_is_what_is_given_or_what_is_got() -> None:
    x = torch.zeros(6)
    assert Operation("broadcast", x).buffer is x
    assert Operation("broadcast", output=x).buffer is x


def test_what_stands_for_an_operation_ends_with_it() -> None:
    x, y = torch.zeros(6), torch.ones(6)
    first = Operation("scatter", x, y, peer=2, background=True, timeout=5, name="tp scatter")
    same = first.replace(y, x)
    assert (same.verb, same.source, same.output) == ("scatter", y, x)
    assert (same.peer, same.background, same.name) == (2, True, "tp scatter")
    assert same.deadline is first.deadline
    other = Operation("all_to_all", x, y, source_sizes=(1, 5, 0)).replace(y, x, verb="all_gather")
    assert (other.verb, other.source_sizes) == ("all_gather", None)


def parts(moving: Operation) -> torch.Tensor:
    """Fill what ``moving`` gets with one row for each rank: of ones, twos and threes."""
    moving.output.view(N, -1)[:] = torch.arange(1.0, N + 1).unsqueeze(1)
    return moving.output


@pytest.mark.parametrize(
    ("verb", "moved_by", "given", "got"),
    [
        ("all_reduce", "all_gather", 4, 4),
        ("reduce", "gather", 4, 4),
        ("reduce_scatter", "all_to_all", 6, 2),
        ("reduce_scatterv", "all_to_all", 6, 3),
    ],
)
def test_reductions_as_movements(verb: str, moved_by: str, given: int, got: int) -> None:
    sizes = (1, 3, 2) if verb == "reduce_scatterv" else None
    x, y = torch.zeros(given), torch.zeros(got)
    product = Operation(verb, x, y, op=ReduceOp.PRODUCT, peer=RANK, source_sizes=sizes)
    moving, reduce = reduce_here(product, RANK, N)
    assert (moving.verb, moving.source, moving.peer) == (moved_by, x, RANK)
    assert moving.source_sizes == sizes
    assert moving.output_parts(N) == (got,) * N
    parts(moving)
    reduce()
    assert y.tolist() == [6.0] * got


def test_who_is_not_the_root_gets_nothing() -> None:
    operation = Operation("reduce", torch.zeros(4), peer=RANK + 1)
    moving, reduce = reduce_here(operation, RANK, N)
    assert moving.output is NO_TENSOR
    reduce()


def test_a_rank_without_a_share_reduces_nothing() -> None:
    x, y = torch.zeros(6), torch.zeros(0)
    operation = Operation("reduce_scatterv", x, y, source_sizes=(2, 0, 4))
    moving, reduce = reduce_here(operation, RANK, N)
    assert moving.output_parts(N) == (0, 0, 0)
    reduce()
