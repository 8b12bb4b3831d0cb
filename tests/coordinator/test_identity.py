"""A group of one: every verb returns its input itself, and costs no copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator, ReduceOp
from shm_broadcast import Board, GroupClosedError

Verb = Callable[..., Any]

TENSORS: dict[str, tuple[Verb, Verb | None]] = {
    "all_reduce": (GroupCoordinator.all_reduce, GroupCoordinator.all_reduce_),
    "all_gather": (GroupCoordinator.all_gather, GroupCoordinator.all_gather_),
    "all_gatherv": (GroupCoordinator.all_gatherv, None),
    "reduce_scatter": (GroupCoordinator.reduce_scatter, GroupCoordinator.reduce_scatter_),
    "reduce_scatterv": (GroupCoordinator.reduce_scatterv, None),
    "all_to_all": (GroupCoordinator.all_to_all, GroupCoordinator.all_to_all_),
    "broadcast": (GroupCoordinator.broadcast, GroupCoordinator.broadcast_),
    "reduce": (GroupCoordinator.reduce, GroupCoordinator.reduce_),
    "gather": (GroupCoordinator.gather, GroupCoordinator.gather_),
    "scatter": (GroupCoordinator.scatter, GroupCoordinator.scatter_),
}

OBJECTS: dict[str, Verb] = {
    "broadcast_object": GroupCoordinator.broadcast_object,
    "broadcast_object_list": GroupCoordinator.broadcast_object_list,
    "broadcast_tensor_dict": GroupCoordinator.broadcast_tensor_dict,
}


@pytest.fixture(params=["without a board", "on a board"])
def group(request: pytest.FixtureRequest) -> Iterator[GroupCoordinator]:
    if request.param == "on a board":
        with Board.create(1) as board, coordinator.init(rank=0, board=board) as groups:
            yield groups.tp
    else:
        with coordinator.init(rank=0) as groups:
            yield groups.tp


def inputs() -> Iterator[torch.Tensor]:
    yield torch.ones(2, 3)
    yield torch.arange(6).reshape(2, 3).t()
    yield torch.ones(4, requires_grad=True)
    yield torch.empty(0, 2)
    yield torch.tensor([1 + 2j, 3]).conj()


@pytest.mark.parametrize("verb", TENSORS)
def test_a_tensor_comes_back_itself(verb: str, group: GroupCoordinator) -> None:
    call, in_place = TENSORS[verb]
    for x in inputs():
        assert call(group, x) is x
        assert call(group, x, async_op=True).wait() is x
        out = torch.zeros_like(x)
        assert call(group, x, out=out) is out
        assert torch.equal(out, x)
        assert call(group, x, out=x) is x
        if in_place is not None:
            assert in_place(group, x) is x
            assert in_place(group, x, async_op=True).wait() is x


def test_variants(group: GroupCoordinator) -> None:
    x, y = torch.ones(2), torch.zeros(3)
    assert group.all_reduce(x, hierarchical=True) is x
    assert group.all_reduce(x, op=ReduceOp.AVG) is x
    assert group.all_gatherv(x, sizes=[2]) is x
    assert group.all_to_all(x, input_sizes=[2], output_sizes=[2]) is x
    several = group.all_gatherv([x, y])
    assert [each is given for each, given in zip(several, (x, y), strict=True)] == [True, True]
    wanted = torch.zeros(2, requires_grad=True)
    assert group.all_gatherv(x, out=wanted) is wanted
    group.barrier()


@pytest.mark.parametrize("verb", OBJECTS)
def test_an_object_comes_back_itself(verb: str, group: GroupCoordinator) -> None:
    cannot_be_pickled = {"f": lambda: 0, "x": torch.ones(1)}
    given: Any = [cannot_be_pickled] if verb == "broadcast_object_list" else cannot_be_pickled
    assert OBJECTS[verb](group, given) is given
    assert OBJECTS[verb](group, given, async_op=True).wait() is given
    with pytest.raises(ValueError, match="src=1 is not a rank"):
        OBJECTS[verb](group, given, 1)


def test_everyones_object(group: GroupCoordinator) -> None:
    given = object()
    (found,) = group.all_gather_object(given)
    assert found is given
    (found,) = group.all_gather_object(given, async_op=True).wait()
    assert found is given


def test_messages_go_nowhere(group: GroupCoordinator) -> None:
    """As vLLM's: what is sent stays, and nothing is received."""
    values = {"x": torch.ones(2), 3: object()}
    assert group.send_tensor_dict(values) is values
    assert group.send_tensor_dict(values, 0, group, {"x": True}) is values
    assert group.isend_tensor_dict(values).wait() is None
    assert group.recv_tensor_dict() is None
    assert group.recv_tensor_dict(0, group) is None
    assert group.irecv_tensor_dict().wait() is None
    for call in (
        lambda: group.send(torch.ones(1)),
        lambda: group.recv(1, torch.float32),
        lambda: group.send_object(1, 0),
        lambda: group.recv_object(0),
    ):
        with pytest.raises(ValueError, match="is this rank itself"):
            call()


def test_a_queue_that_nobody_reads(group: GroupCoordinator) -> None:
    queue = group.create_mq_broadcaster()
    for number in range(100):
        queue.enqueue({"step": number, "pad": b"x" * (1 << 16)}, timeout=5)
    assert queue.broadcast_object("x", timeout=5) == "x"
    queue.shutdown()


def test_a_closed_group_says_so() -> None:
    with coordinator.init(rank=0) as groups:
        group = groups.tp
    for call in (
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.broadcast_object(1),
        lambda: group.all_gather_object(1),
        lambda: group.broadcast_tensor_dict({}),
        lambda: group.send_tensor_dict({}),
        lambda: group.recv_tensor_dict(),
    ):
        with pytest.raises(GroupClosedError):
            call()
