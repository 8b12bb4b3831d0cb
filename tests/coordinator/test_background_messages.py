"""What is begun goes on while its rank waits for something else, whatever moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages.transport import COPIED_BYTES
from device_comm.shm.channel import EAGER_BYTES
from tests.coordinator.sent import agree
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

N = 5
SENDER, RECEIVER = 0, 3


def large() -> dict[str, Any]:
    """More than is copied for anyone."""
    return {"x": torch.arange(COPIED_BYTES), "step": list(range(5000)), "small": torch.ones(3)}


def scatter(group: GroupCoordinator) -> None:
    """What all take part in, and cannot end before the sender is there."""
    x = torch.arange(2 * N) if group.rank_in_group == SENDER else None
    found = group.scatter(x, src=SENDER, dim=0, out=torch.empty(2, dtype=torch.int64))
    assert found.tolist() == [2 * group.rank_in_group, 2 * group.rank_in_group + 1]


def between(
    group: GroupCoordinator, send: Callable[[], Any], receive: Callable[[], Any], check: Any
) -> None:
    """The sender waits before the scatter, the receiver behind it."""
    me = group.rank_in_group
    work = send() if me == SENDER else receive() if me == RECEIVER else None
    if me == SENDER:
        work.wait(20)
    scatter(group)
    if me == RECEIVER:
        check(work.wait(20))


def dict_asked_for(group: GroupCoordinator) -> None:
    between(
        group,
        lambda: group.isend_tensor_dict(large(), RECEIVER),
        lambda: group.irecv_tensor_dict(SENDER),
        lambda found: agree(found, large()),
    )


def object_asked_for(group: GroupCoordinator) -> None:
    obj = ["x" * 5000, b"y" * (3 << 20)]
    between(
        group,
        lambda: group.isend_object(obj, RECEIVER),
        lambda: group.irecv_object(SENDER),
        lambda found: agree({"": found}, {"": obj}),
    )


def several_asked_for(group: GroupCoordinator) -> None:
    """In their order, tensors among them."""

    def send() -> Any:
        group.isend_tensor_dict(large(), RECEIVER)
        group.isend(torch.arange(COPIED_BYTES), RECEIVER)
        return group.isend_tensor_dict(large(), RECEIVER)

    def receive() -> Any:
        group.irecv_tensor_dict(SENDER)
        tensor = group.irecv((COPIED_BYTES,), torch.int64, SENDER)
        behind = group.irecv_tensor_dict(SENDER)
        return behind.then(lambda found: {**found, "tensor": tensor.wait()})

    expected = {**large(), "tensor": torch.arange(COPIED_BYTES)}
    between(group, send, receive, lambda found: agree(found, expected))


def more_than_shared_memory_takes(group: GroupCoordinator) -> None:
    half = torch.ones(EAGER_BYTES // 4 * 3, dtype=torch.uint8)

    def send() -> Any:
        group.isend_tensor_dict({"half": half}, RECEIVER)
        return group.isend_tensor_dict({"half": half}, RECEIVER)

    def receive() -> Any:
        group.irecv_tensor_dict(SENDER)
        return group.irecv_tensor_dict(SENDER)

    between(group, send, receive, lambda found: agree(found, {"half": half}))


def not_asked_for(group: GroupCoordinator) -> None:
    """What is copied is sent ahead of its receive: its send is done."""
    me, x = group.rank_in_group, torch.arange(COPIED_BYTES // 8)
    if me == SENDER:
        works = [
            group.isend(x, RECEIVER),
            group.isend_tensor_dict({"x": x}, RECEIVER),
            group.isend_object("x" * 100_000, RECEIVER),
        ]
        for work in works:
            work.wait(20)
        x.zero_()
    scatter(group)
    if me == RECEIVER:
        assert torch.equal(group.recv(x.shape, x.dtype, SENDER), x)
        agree(group.recv_tensor_dict(SENDER), {"x": x})
        assert group.recv_object(SENDER) == "x" * 100_000


def broadcast(group: GroupCoordinator) -> None:
    """Its source waits at once, one member behind the scatter, the others in between."""
    me = group.rank_in_group
    mine = me == SENDER
    works: list[Any] = [
        group.broadcast_tensor_dict(large() if mine else None, SENDER, async_op=True),
        group.broadcast_object(b"y" * (3 << 20) if mine else None, SENDER, async_op=True),
        group.all_gather_object("z" * 5000, async_op=True),
    ]
    if mine:
        for work in works:
            work.wait(20)
    scatter(group)
    agree(works[0].wait(20), large())
    assert works[1].wait(20) == b"y" * (3 << 20)
    assert works[2].wait(20) == ["z" * 5000] * N


CASES = [
    dict_asked_for,
    object_asked_for,
    several_asked_for,
    more_than_shared_memory_takes,
    not_asked_for,
    broadcast,
]


def run_case(rank: int, n: int, store: Store, case: int, torch_only: bool) -> None:
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=60, operation_timeout=60, torch_only=torch_only
    ) as groups:
        CASES[case](groups.tp)
        groups.tp.barrier()


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_what_was_begun_goes_on(case: int, torch_only: bool) -> None:
    run_ranks(N, run_case, SharedStore(), case, torch_only)
