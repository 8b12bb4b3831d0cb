"""What fails at one end of a message while it is made or taken in: the other end hears of it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

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
    """From member 0 to member 1; the messages behind it are right."""
    for send in (group.send_object, group.isend_object):
        if me == 0:
            with pytest.raises(kind):
                send(odd, 1)
            group.send_object("next", 1)
        else:
            with pytest.raises(MessageRefusedError, match=f"rank 0 sends nothing: .*{why}"):
                group.recv_object(0)
            assert group.recv_object(0) == "next"
    if me == 0:
        with pytest.raises(kind):
            group.send_tensor_dict({"odd": odd}, 1)
    else:
        with pytest.raises(MessageRefusedError, match=f"rank 0 sends nothing: .*{why}"):
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
            with pytest.raises(MessageRefusedError, match=f"rank 0 sends nothing: .*{why}"):
                call()
        assert group.broadcast_object("next" if me == 0 else None) == "next"
        assert group.all_gather_object(me) == [0, 1]


def refusing(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        tp = groups.tp
        for make, kind, why in ODD:
            between(tp, rank, make(), kind, why)
            to_all(tp, rank, make(), kind, why)
        for no_dict in ([1], 5):
            says = "rank 0 is the source: it needs a dict, not"
            with pytest.raises(MessageRefusedError, match=says):
                tp.broadcast_tensor_dict(no_dict if rank == 0 else None)
            assert tp.broadcast_tensor_dict({"step": 2} if rank == 0 else None) == {"step": 2}
            with pytest.raises(MessageRefusedError, match=says):
                tp.send_tensor_dict(no_dict, 1) if rank == 0 else tp.recv_tensor_dict(0)
        with tp.create_mq_broadcaster() as queue:
            tp.mq_broadcaster = queue
            for make, kind, why in ODD:
                to_all(tp, rank, make(), kind, why)
            tp.mq_broadcaster = None


@BOTH
def test_receivers_are_told_of_every_error_of_pickling(torch_only: bool) -> None:
    run_ranks(2, refusing, SharedStore(), torch_only)


# --- no room ------------------------------------------------------------------------------

HUGE = Header(["x"], {"x": TensorMeta("torch.uint8", (1 << 50,), "cpu")})


def no_room(rank: int, n: int, store: Store, torch_only: bool, background: bool) -> list[str]:
    """What member 1 gets of a dict for whose tensor it has no room, and both after it."""
    said: list[str] = []
    with coordinator.init(
        pp=n, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        pp = groups.pp
        if rank == 0:
            pp._messenger.send(Kind.TENSOR_DICT, 1, lambda: to_payload(HUGE, []), None)
            with suppress(GroupAbortedError):  # the other may have noticed meanwhile
                pp.send_object("behind", 1)
            with pytest.raises(GroupAbortedError) as caught:
                pp.recv_object(1)
            return [str(caught.value)]
        receive = (lambda: pp.irecv_tensor_dict(0).wait()) if background else pp.recv_tensor_dict
        with pytest.raises(MessageDecodeError) as unmade:
            receive()
        said.append(str(unmade.value))
        with pytest.raises(GroupAbortedError) as caught:
            pp.recv_object(0)
        return [*said, str(caught.value)]


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "in the background"])
@BOTH
def test_a_receiver_without_room_ends_the_group(torch_only: bool, background: bool) -> None:
    """What follows in the stream cannot be told from the tensor that was not received."""
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
def test_a_member_without_room_for_a_broadcast_ends_the_group(torch_only: bool) -> None:
    run_ranks(2, room_for_a_broadcast, SharedStore(), torch_only)
