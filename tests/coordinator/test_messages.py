"""Objects, tensors and dicts of tensors from member to member, between real processes.

Where it matters the group is [1, 3]: its ranks are not the global ones.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages.transport import OUTSTANDING_BYTES
from device_comm.shm.channel import EAGER_BYTES
from shm_broadcast import (
    DivergenceError,
    GroupAbortedError,
    MessageDecodeError,
    MessageRefusedError,
)
from tests.coordinator.sent import agree
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store


def mixed() -> dict[str, Any]:
    return {
        "hidden": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
        "none": None,
        "empty": torch.empty(0, 7),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "expanded": torch.arange(3).expand(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([1.0, -1.0], dtype=torch.float16),
        "complex": torch.tensor([1 + 2j]),
        "grad": torch.ones(3, requires_grad=True),
        "step": 7,
        "nested": {"ids": [1, 2, (3,)], "name": "x"},
        "big": "y" * 5000,
    }


# --- cases: each runs on both members of a group of two -----------------------------------


def objects(group: GroupCoordinator, me: int, other: int) -> None:
    for obj in (None, {"rank": 0}, "x" * (5 << 20), b"", 1 << 100):
        if me == 0:
            group.send_object(obj, 1)
        else:
            assert group.recv_object(0) == obj
    for src in (0, 1):
        assert group.broadcast_object(("from", me) if me == src else None, src) == ("from", src)
        filled = group.broadcast_object_list([me, src] if me == src else [None, None], src)
        assert filled == [src, src]
    assert group.all_gather_object({"me": me, "pad": "x" * 3000 * me}) == [
        {"me": 0, "pad": ""},
        {"me": 1, "pad": "x" * 3000},
    ]


def object_handles(group: GroupCoordinator, me: int, other: int) -> None:
    first, second = group.irecv_object(other), group.irecv_object(other)
    value = {"from": me, "data": list(range(1000))}
    sent = group.isend_object(value, other)
    value["from"] = "changed after isend"
    group.isend_object("dropped", other)
    assert second.wait() == "dropped"
    assert first.wait() == {"from": other, "data": list(range(1000))}
    assert first.wait() is first.wait()
    assert sent.wait() is sent.wait() is None


def crossed_sends(group: GroupCoordinator, me: int, other: int) -> None:
    """D5: both send first, more than any buffer of a socket holds."""
    big = torch.full((8 << 20,), float(me))
    group.send_object("x" * (20 << 20), other)
    group.send_tensor_dict({"big": big}, other)
    big.fill_(-1)
    group.send_object("behind", other)
    assert len(group.recv_object(other)) == 20 << 20
    assert group.recv_tensor_dict(other)["big"].unique().tolist() == [float(other)]
    assert group.recv_object(other) == "behind"


def many_crossed_sends(group: GroupCoordinator, me: int, other: int) -> None:
    """D5: both send more messages first than a pipe in shared memory holds."""
    for number in range(1500):
        group.send_object(number, other)
    for number in range(300):
        group.send_tensor_dict({"x": torch.full((1250,), float(number))}, other)
    for number in range(1500):
        assert group.recv_object(other) == number
    for number in range(300):
        assert group.recv_tensor_dict(other)["x"].unique().tolist() == [number]


def many_sends_ahead(group: GroupCoordinator, me: int, other: int) -> None:
    """The sender goes ahead up to the limit, then waits for its receiver."""
    limit = OUTSTANDING_BYTES
    if group._messenger.cpu.capabilities.eager_sends:
        limit += EAGER_BYTES
    part = {"part": torch.zeros(limit // 20)}  # a fifth of the limit each
    if me == 0:
        for _ in range(4):
            group.send_tensor_dict(part, 1)
        group.barrier()
        for _ in range(2):
            group.send_tensor_dict(part, 1)
        sent_all = time.monotonic()
        assert group.recv_object(1) < sent_all
    else:
        group.barrier()
        time.sleep(1)
        took_the_first = time.monotonic()
        for _ in range(6):
            agree(group.recv_tensor_dict(0), part)
        group.send_object(took_the_first, 0)


def dicts(group: GroupCoordinator, me: int, other: int) -> None:
    if me == 0:
        group.send_tensor_dict(mixed())
        group.send_tensor_dict({}, 1)
        group.send_tensor_dict(mixed(), dst=1)
    else:
        agree(group.recv_tensor_dict(), mixed())
        assert group.recv_tensor_dict(0) == {}
        agree(group.recv_tensor_dict(src=0), mixed())


def broadcast_dicts(group: GroupCoordinator, me: int, other: int) -> None:
    for src in (0, 1):
        sent = mixed() if me == src else None
        found = group.broadcast_tensor_dict(sent, src)
        agree(found, mixed())
        if sent is not None:
            assert found["hidden"] is sent["hidden"]
    assert group.broadcast_tensor_dict({} if me == 0 else None) == {}


def collectives_in_the_background(group: GroupCoordinator, me: int, other: int) -> None:
    """Works of what collects objects, with other collectives and messages in between."""
    works = []
    for src in (0, 1):
        mine = me == src
        works += [
            group.broadcast_object({"from": me} if mine else None, src, async_op=True),
            group.broadcast_object_list([me, "x" * 9000] if mine else [0, 0], src, async_op=True),
            group.broadcast_tensor_dict(mixed() if mine else None, src, async_op=True),
            group.all_gather_object(("me", me, "y" * 2000 * me), async_op=True),
        ]
        group.isend_object("between", other)
        assert group.all_reduce(torch.tensor([1 + me])).item() == 3
        assert group.recv_object(other) == "between"
    for src in (1, 0):
        obj, several, tensors, everyone = works[4 * src : 4 * src + 4]
        agree(tensors.wait(), mixed())
        assert everyone.wait() == [("me", 0, ""), ("me", 1, "y" * 2000)]
        assert obj.wait() == obj.wait() == {"from": src}
        assert several.wait() == several.wait() == [src, "x" * 9000]
    group.broadcast_object("dropped" if me == 0 else None, async_op=True)

    async def awaited() -> Any:
        return await group.broadcast_object(me, 1, async_op=True)

    assert asyncio.run(awaited()) == 1
    unequal = group.broadcast_object_list([1, 2] if me == 0 else [1], async_op=True)
    if me == 0:
        assert unequal.wait() == [1, 2]
    else:
        with pytest.raises(ValueError, match="rank 0 has 2 objects, this one 1"):
            unequal.wait()


def dict_handles(group: GroupCoordinator, me: int, other: int) -> None:
    """D4: isend returns without a receive; order holds among kinds; handles may be dropped."""
    if me == 0:
        x = torch.arange(1 << 20)
        kept = group.isend_tensor_dict({"x": x}, 1)
        group.isend_tensor_dict({"dropped": torch.ones(1 << 16), "o": {1}}, 1)
        group.isend(torch.tensor([4, 5]), 1)
        group.isend_tensor_dict(mixed(), 1)
        group.barrier()
        kept.wait()
        kept.wait()
    else:
        group.barrier()
        first = group.irecv_tensor_dict(0)
        group.irecv_tensor_dict(0)
        third = group.irecv((2,), torch.int64, 0)
        fourth = group.irecv_tensor_dict(0)
        agree(fourth.wait(), mixed())
        assert third.wait().tolist() == [4, 5]
        assert torch.equal(first.wait()["x"], torch.arange(1 << 20))
        assert first.wait() is first.wait()


def tensors_behind_dicts(group: GroupCoordinator, me: int, other: int) -> None:
    """A blocking recv does not overtake a dict that was asked for before."""
    if me == 0:
        group.send_tensor_dict({"a": torch.ones(3)}, 1)
        group.send(torch.full((2,), 9.0), 1)
    else:
        handle = group.irecv_tensor_dict(0)
        assert group.recv((2,), torch.float32, 0).tolist() == [9, 9]
        agree(handle.wait(), {"a": torch.ones(3)})


def awaited(group: GroupCoordinator, me: int, other: int) -> None:
    async def swap() -> dict[str, Any]:
        sent = group.isend_tensor_dict({"me": me, "t": torch.ones(2) * me}, other)
        found = await group.irecv_tensor_dict(other)
        await sent
        return found

    agree(asyncio.run(swap()), {"me": other, "t": torch.ones(2) * other})


def refused(group: GroupCoordinator, me: int, other: int) -> None:
    """What is wrong on all members raises before anything moves; the next verb is right."""
    for call, error in (
        (lambda: group.broadcast_object(1, src=-1), ValueError),
        (lambda: group.broadcast_object(1, src=2), ValueError),
        (lambda: group.broadcast_tensor_dict({}, src=-1), ValueError),
        (lambda: group.broadcast_object(1, src=-1, async_op=True), ValueError),
        (lambda: group.broadcast_tensor_dict({}, src=2, async_op=True), ValueError),
        (lambda: group.send_object(1, me), ValueError),
        (lambda: group.recv_object(me), ValueError),
        (lambda: group.send(torch.ones(1), me), ValueError),
        (lambda: group.recv((1,), torch.float32, 5), ValueError),
        (lambda: group.recv(), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert group.broadcast_object(me, 1) == 1
    assert group.all_reduce(torch.tensor([me])).item() == 1


def told_to_both(group: GroupCoordinator, me: int, other: int) -> None:
    """What cannot be sent raises at both ends, in its place among what can."""
    ranks = group.ranks
    odd: list[tuple[Any, type[Exception], str]] = [
        ({"f": lambda: 0}, TypeError, "cannot pickle"),
        ({frozenset(): 1}, TypeError, "keys of a tensor dict"),
        ({"s": torch.eye(2).to_sparse()}, TypeError, "not a dense tensor"),
        ({"m": torch.empty(1, device="meta")}, ValueError, "'m' is on meta"),
    ]
    for values, kind, why in odd:
        for send in (group.send_tensor_dict, group.isend_tensor_dict):
            with pytest.raises(kind, match=why):
                send(values, other)
            with pytest.raises(
                MessageRefusedError, match=f"rank {ranks[other]} sends nothing: .*{why}"
            ):
                group.recv_tensor_dict(other)
    for send_object in (group.send_object, group.isend_object):
        with pytest.raises(
            MessageRefusedError, match=f"rank {ranks[me]} sends nothing: cannot pickle"
        ):
            send_object(lambda: 0, other)
        group.isend_object("next", other)
        first, second = group.irecv_object(other), group.irecv_object(other)
        assert second.wait() == "next"
        with pytest.raises(MessageRefusedError, match=f"rank {ranks[other]} sends nothing"):
            first.wait()
    assert group.all_gather_object(me) == [0, 1]


def told_to_all(group: GroupCoordinator, me: int, other: int) -> None:
    """What cannot be sent to all raises at all of them, in the background, too."""
    ranks = group.ranks
    for background in (False, True):

        def result(called: Any, background: bool = background) -> Any:
            return called.wait() if background else called

        for src in (0, 1):
            obj = (lambda: 0) if me == src else me
            with pytest.raises(
                MessageRefusedError, match=f"rank {ranks[src]} sends nothing: cannot"
            ):
                result(group.broadcast_object(obj, src, async_op=background))
            mine: dict[str, Any] | None = None if me == src else {}
            with pytest.raises(ValueError if me == src else MessageRefusedError, match="dict"):
                result(group.broadcast_tensor_dict(mine, src, async_op=background))
            with pytest.raises(
                MessageRefusedError, match=f"rank {ranks[src]} sends nothing: cannot"
            ):
                result(group.all_gather_object(obj, async_op=background))
    assert group.all_gather_object(me) == [0, 1]
    assert group.all_reduce(torch.tensor([me])).item() == 1


def undecodable(group: GroupCoordinator, me: int, other: int) -> None:
    """A message that cannot be restored is consumed; the next one is right."""
    if me == 0:
        group.send_object(Unloadable(), 1)
        group.send_tensor_dict({"o": Unloadable(), "t": torch.ones(2)}, 1)
        group.send_object("good", 1)
    else:
        with pytest.raises(MessageDecodeError, match="not here"):
            group.recv_object(0)
        with pytest.raises(MessageDecodeError, match="not here"):
            group.recv_tensor_dict(0)
        assert group.recv_object(0) == "good"


def another_default_device(group: GroupCoordinator, me: int, other: int) -> None:
    """Tensors are made where they belong, whatever ``torch.set_default_device`` says."""
    small, large = torch.arange(4.0), torch.arange(3000.0)
    with torch.device("meta"):
        for send in (group.send_tensor_dict, group.isend_tensor_dict):
            send({"small": small, "large": large, "step": 3}, other)
            agree(group.recv_tensor_dict(other), {"small": small, "large": large, "step": 3})
        found = group.broadcast_tensor_dict({"small": small} if me == 0 else None)
        agree(found, {"small": small})
        group.isend_object({"text": "x" * 10000, "empty": small[:0]}, other)
        assert group.recv_object(other)["empty"].device.type == "cpu"
        assert group.all_gather_object(me) == [0, 1]
        group.isend(small, other)
        assert torch.equal(group.recv(4, torch.float32, other), small)
        assert torch.equal(group.all_reduce(small), small * 2)
        assert group.all_gather(small.view(2, 2).t(), 1).device.type == "cpu"
        assert group.reduce_scatterv(small, 0, [3, 1]).numel() == 3 - 2 * me


class Unloadable:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("not here")


CASES = [
    objects,
    object_handles,
    crossed_sends,
    many_crossed_sends,
    many_sends_ahead,
    dicts,
    broadcast_dicts,
    collectives_in_the_background,
    dict_handles,
    tensors_behind_dicts,
    awaited,
    refused,
    told_to_both,
    told_to_all,
    undecodable,
    another_default_device,
]


def run_cases(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with coordinator.init(
        tp=n // 2,
        pp=2,
        rank=rank,
        world_size=n,
        store=store,
        timeout=30,
        operation_timeout=30,
        torch_only=torch_only,
    ) as groups:
        group = groups.pp
        for case in CASES:
            if groups.tp.rank_in_group == groups.tp.world_size - 1:
                case(group, group.rank_in_group, 1 - group.rank_in_group)
            groups.world.barrier()


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
@pytest.mark.parametrize("n", [2, 4], ids=["ranks 0 and 1", "ranks 1 and 3"])
def test_every_kind_of_message(n: int, torch_only: bool) -> None:
    run_ranks(n, run_cases, SharedStore(), torch_only)


# --- another kind than what was sent ------------------------------------------------------

ASKED: dict[str, tuple[Callable[[GroupCoordinator], Any], Callable[[GroupCoordinator], Any]]] = {
    "receive of object, send of tensor dict": (
        lambda group: group.recv_object(0),
        lambda group: group.send_tensor_dict({"x": torch.ones(2)}, 1),
    ),
    "receive of tensor dict, send of object": (
        lambda group: group.recv_tensor_dict(0),
        lambda group: group.send_object(1, 1),
    ),
    "receive of object, send of broadcast object": (
        lambda group: group.recv_object(0),
        lambda group: group.broadcast_object(1, async_op=True),
    ),
    "receive of broadcast object, send of broadcast tensor dict": (
        lambda group: group.broadcast_object(),
        lambda group: group.broadcast_tensor_dict({}),
    ),
}


def another_kind(rank: int, n: int, store: Store, torch_only: bool) -> None:
    for said, (ask, send) in ASKED.items():
        with coordinator.init(
            pp=2, rank=rank, store=store, timeout=30, torch_only=torch_only
        ) as groups:
            if rank == 1:
                with pytest.raises(DivergenceError) as caught:
                    ask(groups.pp)
                assert caught.value.rank == 0
                assert f"{caught.value.ours}, {caught.value.theirs}" == said
            else:
                with suppress(GroupAbortedError):  # the other may have noticed meanwhile
                    send(groups.pp)
            with pytest.raises(GroupAbortedError, match="DivergenceError"):
                groups.pp.recv_object(1 - rank)


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
def test_a_message_of_another_kind_is_told_apart(torch_only: bool) -> None:
    run_ranks(2, another_kind, SharedStore(), torch_only)
