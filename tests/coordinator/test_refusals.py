"""Errors at one end of a message while it is made or received: the other end gets them too.

Pickling fails on rank 2 of the world, which is rank 0 of its group: errors name the former.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import Store

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages.tensor_dict import Header, TensorMeta, to_payload
from coordinator.messages.wire import Kind
from shm_broadcast import (
    GroupAbortedError,
    MessageDecodeError,
    MessageRefusedError,
)
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

BOTH = pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])


class Unpicklable:
    """Pickling it raises an error of its own."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def nested() -> list[Any]:
    """Too deep for pickle."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


ODD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (nested, RecursionError, "RecursionError: "),
    (lambda: Unpicklable(RuntimeError("not this")), RuntimeError, "RuntimeError: not this"),
    (lambda: Unpicklable(ValueError("not that")), ValueError, "not that"),
    (lambda: Unpicklable(KeyError()), KeyError, "KeyError"),
]


def between(group: GroupCoordinator, me: int, odd: Any, kind: type[Exception], why: str) -> None:
    """From member 0 to member 1; the next messages are right."""
    for send in (group.send_object, group.isend_object):
        if me == 0:
            with pytest.raises(kind):
                send(odd, 1)
            group.send_object("next", 1)
        else:
            with pytest.raises(
                MessageRefusedError, match=f"rank 2 sends nothing: .*{why}"
            ) as error:
                group.recv_object(0)
            assert error.value.rank == 2
            assert group.recv_object(0) == "next"
    if me == 0:
        with pytest.raises(kind):
            group.send_tensor_dict({"odd": odd}, 1)
    else:
        with pytest.raises(MessageRefusedError, match=f"rank 2 sends nothing: .*{why}"):
            group.recv_tensor_dict(0)


def to_all(group: GroupCoordinator, me: int, odd: Any, kind: type[Exception], why: str) -> None:
    """From member 0, which writes the group's queue if it has one; the next one is right."""
    mine = odd if me == 0 else 1
    calls: list[Callable[[], Any]] = [
        lambda: group.broadcast_object(mine),
        lambda: group.broadcast_object(mine, async_op=True).wait(),
        lambda: group.broadcast_tensor_dict({"odd": mine}),
        lambda: group.all_gather_object(mine),
        lambda: group.all_gather_object(mine, async_op=True).wait(),
    ]
    for call in calls:
        if me == 0:
            with pytest.raises(kind):
                call()
        else:
            with pytest.raises(MessageRefusedError, match=f"rank 2 sends nothing: .*{why}"):
                call()
        assert group.broadcast_object("next" if me == 0 else None) == "next"
        assert group.all_gather_object(me) == [0, 1]


def refusing(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=30) as groups:
        if rank >= 2:
            refuse_in(groups.tp, rank - 2)
        groups.world.barrier()


def refuse_in(tp: GroupCoordinator, me: int) -> None:
    for make, kind, why in ODD:
        between(tp, me, make(), kind, why)
        to_all(tp, me, make(), kind, why)
    for no_dict in (None, [1], 5):
        says = "rank 2 is the source: it needs a dict"
        with pytest.raises((MessageRefusedError, ValueError), match=says):
            tp.broadcast_tensor_dict(no_dict if me == 0 else None)
        assert tp.broadcast_tensor_dict({"step": 2} if me == 0 else None) == {"step": 2}
        if no_dict is not None:
            with pytest.raises(MessageRefusedError, match=says):
                tp.send_tensor_dict(no_dict, 1) if me == 0 else tp.recv_tensor_dict(0)
    with tp.create_mq_broadcaster() as queue:
        tp.mq_broadcaster = queue
        for make, kind, why in ODD:
            to_all(tp, me, make(), kind, why)
        tp.mq_broadcaster = None


def test_receivers_get_every_error_of_pickling() -> None:
    run_ranks(4, refusing, SharedStore())


# --- no room ------------------------------------------------------------------------------

HUGE = Header(["x"], {"x": TensorMeta("torch.uint8", (1 << 50,), "cpu")})


def no_room(rank: int, n: int, store: Store, torch_only: bool, background: bool) -> list[str]:
    """Rank 1 receives a dict for whose tensor it has no memory; the errors of both."""
    with coordinator.init(
        pp=n, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        pp, said = groups.pp, []
        if rank == 0:
            pp._messenger.send(Kind.TENSOR_DICT, 1, lambda: to_payload(HUGE, []), None)
            with suppress(GroupAbortedError):  # the other may have aborted meanwhile
                pp.send_object("behind", 1)
        else:
            with pytest.raises(MessageDecodeError) as unmade:
                pp.irecv_tensor_dict(0).wait() if background else pp.recv_tensor_dict()
            said.append(str(unmade.value))
        with pytest.raises(GroupAbortedError) as caught:
            pp.recv_object(1 - rank)
        return [*said, str(caught.value)]


@pytest.mark.parametrize(("torch_only", "background"), [(True, False), (False, True)])
def test_a_receiver_without_memory_aborts_the_group(torch_only: bool, background: bool) -> None:
    """The next message could not be distinguished from the tensor that was not received."""
    sender, receiver = run_ranks(2, no_room, SharedStore(), torch_only, background)
    for text in (*sender, *receiver):
        assert "a message of rank 0 cannot be received: " in text
    for text in (*sender, receiver[1]):
        assert "rank 1 reported: MessageDecodeError" in text


def room_for_a_broadcast(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with coordinator.init(
        pp=n, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        if rank == 0:
            kind, payload = Kind.BROADCAST_TENSOR_DICT, lambda: to_payload(HUGE, [])
            groups.pp._messenger._broadcast(kind, payload, None, None, async_op=False)
        else:
            with pytest.raises(MessageDecodeError, match="a message of rank 0 cannot be received"):
                groups.pp.broadcast_tensor_dict(src=0)
        with pytest.raises(GroupAbortedError, match="rank 1 reported: MessageDecodeError"):
            groups.pp.recv_object(1 - rank)


@BOTH
def test_a_rank_without_memory_for_a_broadcast_aborts_the_group(torch_only: bool) -> None:
    run_ranks(2, room_for_a_broadcast, SharedStore(), torch_only)
