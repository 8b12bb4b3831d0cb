"""Objects, tensors and dicts of tensors from member to member, between real processes.

`tests.fuzz` has all of them in any order, and in the background.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages import incoming
from coordinator.messages.transport import COPIED_BYTES, OUTSTANDING_BYTES, AnotherThreadError
from device_comm.shm.channel import EAGER_BYTES
from shm_broadcast import (
    DivergenceError,
    GroupAbortedError,
    GroupTimeoutError,
    MessageDecodeError,
    MessageRefusedError,
)
from tests.coordinator.sent import agree
from tests.patience import until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

both_transports = pytest.mark.parametrize(
    "torch_only", [True, False], ids=["torch", "shared memory"]
)


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


# --- each case runs on both members of a group of two, whose ranks are 1 and 3 -------------


def objects(group: GroupCoordinator, me: int, other: int) -> None:
    for obj in (None, {"rank": 0}, "x" * (5 << 20), b"", 1 << 100):
        group.isend_object(obj, other)
        assert group.recv_object(other) == obj
    for src in (0, 1):
        assert group.broadcast_object(("from", me) if me == src else None, src) == ("from", src)
    first, second = group.irecv_object(other), group.irecv_object(other)
    value = {"from": me}
    group.send_object(value, other)
    value["from"] = -1
    group.isend_object("dropped", other)
    assert second.wait() == "dropped"
    assert first.wait() is first.wait()
    assert first.wait() == {"from": other}
    unequal = group.broadcast_object_list([1, 2] if me == 0 else [1], async_op=True)
    if me == 0:
        assert unequal.wait() == [1, 2]
    else:
        with pytest.raises(ValueError, match=r"rank \d has 2 objects, this one 1"):
            unequal.wait()


def crossed_sends(group: GroupCoordinator, me: int, other: int) -> None:
    """D5: both send first, more than any buffer holds, and more messages."""
    big = torch.full((6 << 20,), float(me))
    group.send_object("x" * (9 << 20), other)
    group.send_tensor_dict({"big": big}, other)
    big.fill_(-1)
    group.send_object("behind", other)
    assert len(group.recv_object(other)) == 9 << 20
    assert group.recv_tensor_dict(other)["big"].unique().tolist() == [float(other)]
    assert group.recv_object(other) == "behind"
    for number in range(1100):
        group.send_object(number, other)
    for number in range(100):
        group.send_tensor_dict({"x": torch.full((1250,), float(number))}, other)
    numbers = [group.irecv_object(other) for _ in range(1100)]  # more than Python nests calls
    assert numbers[-1].wait() == 1099
    assert [each.wait() for each in numbers] == [*range(1100)]
    for number in range(100):
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
        time.sleep(0.5)
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
    for src in (0, 1):
        sent = mixed() if me == src else None
        found = group.broadcast_tensor_dict(sent, src)
        agree(found, mixed())
        if sent is not None:
            assert found["hidden"] is sent["hidden"]
    assert group.broadcast_tensor_dict({} if me == 0 else None) == {}


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
        group.send_tensor_dict({"a": torch.ones(3)}, 1)
        group.send(torch.full((2,), 9.0), 1)
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
        handle = group.irecv_tensor_dict(0)  # which a blocking receive does not overtake
        assert group.recv((2,), torch.float32, 0).tolist() == [9, 9]
        agree(handle.wait(), {"a": torch.ones(3)})


def awaited(group: GroupCoordinator, me: int, other: int) -> None:
    async def swap() -> tuple[dict[str, Any], Any]:
        sent = group.isend_tensor_dict({"me": me, "t": torch.ones(2) * me}, other)
        found = await group.irecv_tensor_dict(other)
        await sent
        return found, await group.broadcast_object(me, 1, async_op=True)

    agree(asyncio.run(swap()), ({"me": other, "t": torch.ones(2) * other}, 1))


def wrong_arguments_move_nothing(group: GroupCoordinator, me: int, other: int) -> None:
    for call in (
        lambda: group.broadcast_object(1, src=-1),
        lambda: group.broadcast_object(1, src=2),
        lambda: group.broadcast_object_list([1], src=-1),
        lambda: group.broadcast_tensor_dict({}, src=-1),
        lambda: group.broadcast_object(1, src=-1, async_op=True),
        lambda: group.broadcast_tensor_dict({}, src=2, async_op=True),
        lambda: group.send_object(1, me),
        lambda: group.recv_object(me),
        lambda: group.send(torch.ones(1), me),
        lambda: group.recv((1,), torch.float32, 5),
        lambda: group.recv(),
    ):
        with pytest.raises(ValueError, match=r"src|dst|rank|itself|size"):
            call()
    assert group.broadcast_object(me, 1) == 1
    assert group.all_reduce(torch.tensor([me])).item() == 1


def refused_at_both_ends(group: GroupCoordinator, me: int, other: int) -> None:
    """A value that cannot be sent raises at both ends, in its place among the others."""
    ranks = group.ranks
    odd: list[tuple[Any, type[Exception], str]] = [
        ({"f": lambda: 0}, TypeError, "cannot pickle"),
        ({frozenset(): 1}, TypeError, "keys of a tensor dict"),
        ({"s": torch.eye(2).to_sparse()}, TypeError, "not a dense tensor"),
        ({"m": torch.empty(1, device="meta")}, ValueError, "'m' is on meta"),
    ]
    theirs = f"rank {ranks[other]} sends nothing"
    for values, kind, why in odd:
        for send in (group.send_tensor_dict, group.isend_tensor_dict):
            with pytest.raises(kind, match=why):
                send(values, other)
            with pytest.raises(MessageRefusedError, match=f"{theirs}: .*{why}"):
                group.recv_tensor_dict(other)
    for send_object in (group.send_object, group.isend_object):
        with pytest.raises(
            MessageRefusedError, match=f"rank {ranks[me]} sends nothing: cannot pickle"
        ):
            send_object(lambda: 0, other)
        group.isend_object("next", other)
        first, second = group.irecv_object(other), group.irecv_object(other)
        assert second.wait() == "next"
        with pytest.raises(MessageRefusedError, match=theirs):
            first.wait()
    assert group.all_gather_object(me) == [0, 1]


def refused_at_all_ends(group: GroupCoordinator, me: int, other: int) -> None:
    for background in (False, True):

        def result(called: Any, background: bool = background) -> Any:
            return called.wait() if background else called

        for src in (0, 1):
            obj = (lambda: 0) if me == src else me
            mine: dict[str, Any] | None = None if me == src else {}
            why = f"rank {group.ranks[src]} sends nothing: cannot"
            with pytest.raises(MessageRefusedError, match=why):
                result(group.broadcast_object(obj, src, async_op=background))
            with pytest.raises(ValueError if me == src else MessageRefusedError, match="dict"):
                result(group.broadcast_tensor_dict(mine, src, async_op=background))
            with pytest.raises(MessageRefusedError, match=why):
                result(group.all_gather_object(obj, async_op=background))
    assert group.all_gather_object(me) == [0, 1]
    assert group.all_reduce(torch.tensor([me])).item() == 1


class Unloadable:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("not here")


def undecodable(group: GroupCoordinator, me: int, other: int) -> None:
    """A message that cannot be decoded is consumed; the next one is right."""
    if me == 0:
        group.send_object(Unloadable(), 1)
        group.send_tensor_dict({"o": Unloadable(), "t": torch.ones(2)}, 1)
        group.send_object("good", 1)
    else:
        for receive in (group.recv_object, group.recv_tensor_dict):
            with pytest.raises(MessageDecodeError, match="not here"):
                receive(0)
        assert group.recv_object(0) == "good"


def another_default_device(group: GroupCoordinator, me: int, other: int) -> None:
    """Tensors are made where they belong, whatever ``torch.set_default_device`` is."""
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


CASES = (
    objects,
    crossed_sends,
    many_sends_ahead,
    dicts,
    dict_handles,
    awaited,
    wrong_arguments_move_nothing,
    refused_at_both_ends,
    refused_at_all_ends,
    undecodable,
    another_default_device,
)


def run_cases(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with coordinator.init(
        tp=2,
        pp=2,
        rank=rank,
        store=store,
        timeout=30,
        operation_timeout=30,
        torch_only=torch_only,
    ) as groups:
        group = groups.pp
        for case in CASES:
            if groups.tp.is_last_rank:
                case(group, group.rank_in_group, 1 - group.rank_in_group)
            groups.world.barrier()


@both_transports
def test_every_kind_of_message_arrives(torch_only: bool) -> None:
    run_ranks(4, run_cases, SharedStore(), torch_only)


# --- another kind than the receive's -------------------------------------------------------

KINDS: dict[str, tuple[Callable[[GroupCoordinator], Any], Callable[[GroupCoordinator], Any]]] = {
    "object": (lambda g: g.recv_object(0), lambda g: g.send_object(1, 1)),
    "tensor dict": (
        lambda g: g.recv_tensor_dict(0),
        lambda g: g.send_tensor_dict({"x": torch.ones(2)}, 1),
    ),
    "broadcast object": (
        lambda g: g.broadcast_object(),
        lambda g: g.broadcast_object(1, async_op=True),
    ),
    "broadcast tensor dict": (
        lambda g: g.broadcast_tensor_dict(),
        lambda g: g.broadcast_tensor_dict({}),
    ),
}


def another_kind(rank: int, n: int, store: Store, torch_only: bool) -> None:
    for ours, theirs in (
        ("object", "tensor dict"),
        ("tensor dict", "object"),
        ("object", "broadcast object"),
        ("broadcast object", "broadcast tensor dict"),
    ):
        with coordinator.init(
            pp=2, rank=rank, store=store, timeout=30, torch_only=torch_only
        ) as groups:
            if rank == 1:
                with pytest.raises(DivergenceError) as caught:
                    KINDS[ours][0](groups.pp)
                assert caught.value.rank == 0
                assert caught.value.ours == f"receive of {ours}"
                assert caught.value.theirs == f"send of {theirs}"
            else:
                with suppress(GroupAbortedError):  # the other may have noticed meanwhile
                    KINDS[theirs][1](groups.pp)
            with pytest.raises(GroupAbortedError, match="DivergenceError"):
                groups.pp.recv_object(1 - rank)


@both_transports
def test_a_message_of_another_kind_is_a_divergence(torch_only: bool) -> None:
    run_ranks(2, another_kind, SharedStore(), torch_only)


# --- in the background: the sender waits before a scatter, the receiver behind it ----------

N = 5
SENDER, RECEIVER = 0, 3


def large() -> dict[str, Any]:
    """More than is copied for a send."""
    return {"x": torch.arange(COPIED_BYTES), "step": list(range(5000)), "small": torch.ones(3)}


def scatter(group: GroupCoordinator) -> None:
    """All members take part, and cannot end it before the sender begins."""
    x = torch.arange(2 * N) if group.rank_in_group == SENDER else None
    found = group.scatter(x, src=SENDER, dim=0, out=torch.empty(2, dtype=torch.int64))
    assert found.tolist() == [2 * group.rank_in_group, 2 * group.rank_in_group + 1]


def several_go_on_in_their_order(group: GroupCoordinator) -> Any:
    tensor, obj = torch.arange(COPIED_BYTES), ["x" * 5000, b"y" * (3 << 20)]
    if group.rank_in_group == SENDER:
        group.isend_tensor_dict(large(), RECEIVER)
        group.isend_object(obj, RECEIVER)
        group.isend(tensor, RECEIVER)
        return group.isend_tensor_dict(large(), RECEIVER)
    group.irecv_tensor_dict(SENDER)
    text = group.irecv_object(SENDER)
    found = group.irecv((COPIED_BYTES,), torch.int64, SENDER)
    behind = group.irecv_tensor_dict(SENDER)
    return behind.then(
        lambda last: agree((text.wait(), found.wait(), last), (obj, tensor, large()))
    )


def more_than_shared_memory_holds_goes_on(group: GroupCoordinator) -> Any:
    half = {"half": torch.ones(EAGER_BYTES // 4 * 3, dtype=torch.uint8)}
    if group.rank_in_group == SENDER:
        group.isend_tensor_dict(half, RECEIVER)
        return group.isend_tensor_dict(half, RECEIVER)
    group.irecv_tensor_dict(SENDER)
    return group.irecv_tensor_dict(SENDER).then(lambda found: agree(found, half))


def a_copied_send_needs_no_receive(group: GroupCoordinator) -> None:
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


def a_broadcast_goes_on(group: GroupCoordinator) -> None:
    """Its source waits at once, the others behind the scatter."""
    mine = group.rank_in_group == SENDER
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


def in_the_background(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=60, operation_timeout=60, torch_only=torch_only
    ) as groups:
        for begin in (several_go_on_in_their_order, more_than_shared_memory_holds_goes_on):
            work = begin(groups.tp) if rank in (SENDER, RECEIVER) else None
            if rank == SENDER:
                work.wait(20)
            scatter(groups.tp)
            if rank == RECEIVER:
                work.wait(20)
            groups.tp.barrier()
        for case in (a_copied_send_needs_no_receive, a_broadcast_goes_on):
            case(groups.tp)
            groups.tp.barrier()


@both_transports
def test_messages_go_on_in_the_background(torch_only: bool) -> None:
    run_ranks(N, in_the_background, SharedStore(), torch_only)


# --- threads of a rank that send and receive at once ---------------------------------------

SECRET = b"s" * 32
MANY = 200


def second_sender(rank: int, n: int, store: Store, secret: bytes | None) -> None:
    """While a thread waits in a send, another one is refused; the other messages arrive."""
    part = {"part": torch.zeros((OUTSTANDING_BYTES + EAGER_BYTES) // 5, dtype=torch.uint8)}
    large = {"large": torch.ones(OUTSTANDING_BYTES + EAGER_BYTES, dtype=torch.uint8)}
    torch_only = secret is not None  # so that messages are numbered, and sealed
    parts = 1 if torch_only else 4  # which do not wait by themselves
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=30, secret=secret, torch_only=torch_only
    ) as groups:
        group = groups.tp
        if rank == 0:
            for _ in range(parts):
                group.send_tensor_dict(part)
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(group.send_tensor_dict, large)
                under_way = group._messenger._outgoing._under_way
                # The first that is too large is kept by the thread, which has the turn then.
                until(lambda: any(each[0] > OUTSTANDING_BYTES for each in [*under_way.get(1, ())]))
                for send in (group.send_object, group.isend_object):
                    with pytest.raises(RuntimeError, match="another thread is sending over tp"):
                        send("lost", 1)
                store.set("tried", "")
                waiting.result()
            group.send_object("after", 1)
        else:
            store.get("tried")
            for expected in (*[part] * parts, large):
                agree(group.recv_tensor_dict(), expected)
            assert group.recv_object(0) == "after"
        groups.world.barrier()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["", "sealed"])
def test_a_second_thread_that_sends_is_refused(secret: bytes | None) -> None:
    run_ranks(2, second_sender, SharedStore(), secret)


def second_receiver(rank: int, n: int, store: Store, torch_only: bool) -> None:
    """Two threads of rank 1 receive from rank 0 at once: each message is one thread's, whole."""
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        group = groups.tp
        kinds: list[tuple[Callable[[int], Any], Callable[[], int]]] = [
            (
                lambda number: group.send_object((number, "x" * (number % 5000)), 1),
                lambda: group.recv_object(0)[0],
            ),
            (
                lambda number: group.send_tensor_dict({"is": number, "x": torch.ones(9999)}, 1),
                lambda: group.recv_tensor_dict(0)["is"],
            ),
            (
                lambda number: group.send(torch.full((5,), float(number)), 1),
                lambda: int(group.recv((5,), torch.float32, 0)[0]),
            ),
            (lambda number: group.send_object(number, 1), lambda: group.irecv_object(0).wait()),
        ]
        for send, receive in kinds:
            got: list[int] = []

            def take(_: int, got: list[int] = got, receive: Callable[[], int] = receive) -> None:
                while len(got) < MANY - 1:  # the other one may wait for the last
                    try:
                        got.append(receive())
                    except AnotherThreadError:
                        time.sleep(0)

            if rank == 0:
                for number in range(MANY):
                    send(number)
            else:
                with ThreadPoolExecutor(2) as threads:
                    list(threads.map(take, range(2)))
                if len(got) < MANY:
                    got.append(receive())
                assert sorted(got) == list(range(MANY))
            groups.world.barrier()


@both_transports
def test_a_second_thread_that_receives_from_a_rank_is_refused(torch_only: bool) -> None:
    run_ranks(2, second_receiver, SharedStore(), torch_only)


def threads_of_three(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        group = groups.tp
        others = [other for other in range(n) if other != rank]

        def take(src: int) -> list[Any]:
            return [group.recv_object(src) for _ in range(MANY)]

        with ThreadPoolExecutor(n) as threads:
            found = {src: threads.submit(take, src) for src in others}
            for number in range(MANY):
                for dst in others:
                    group.send_object((rank, number), dst)
            for src, taken in found.items():
                assert taken.result() == [(src, number) for number in range(MANY)]
            if rank == 0:  # a broadcast that is refused before it begins changes nothing
                turn = group._messenger._outgoing._turn
                with ThreadPoolExecutor(1) as another:
                    assert another.submit(turn.__enter__).result()
                    with pytest.raises(RuntimeError, match="another thread is sending over tp"):
                        group.broadcast_object("lost", async_op=True)
                    another.submit(turn.__exit__).result()
        work = group.broadcast_object("after" if rank == 0 else None, async_op=True)
        assert work.wait() == "after"
        groups.world.barrier()


def test_threads_receive_from_different_ranks_and_one_broadcasts() -> None:
    run_ranks(3, threads_of_three, SharedStore())


# --- deadlines -----------------------------------------------------------------------------


def nothing_arrives(rank: int, n: int, store: Store) -> None:
    """A handle may be waited for again; a blocking call that gives up ends the group."""
    with coordinator.init(pp=2, rank=rank, store=store, timeout=30) as groups:
        if rank == 0:
            pending = groups.pp.irecv_object(1)
            with pytest.raises(GroupTimeoutError):
                pending.wait(0.1)
            groups.pp.barrier()
            assert pending.wait() == "late"
            with pytest.raises(GroupTimeoutError, match="rank 1") as caught:
                groups.pp.recv_tensor_dict(timeout=0.3)
            assert [member.rank for member in caught.value.waiting_for] == [1]
        else:
            groups.pp.barrier()
            groups.pp.send_object("late", 0)
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.pp.recv_object(1 - rank)


def a_send_gives_up(rank: int, n: int, store: Store, torch_only: bool) -> None:
    """On both ends, for a part of the message may have arrived."""

    def send_again_and_again(x: torch.Tensor) -> None:
        for _ in range(4):
            groups.pp.send(x, 1, timeout=0.3)

    with coordinator.init(
        pp=2, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        if rank == 0:
            with pytest.raises(GroupTimeoutError):
                send_again_and_again(torch.zeros(OUTSTANDING_BYTES + EAGER_BYTES).byte())
            store.set("gave up", "")
        else:
            store.get("gave up")
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.pp.recv_object(1 - rank)


def a_broadcast_gives_up(rank: int, n: int, store: Store) -> None:
    """Also where several tensors are under way at once."""
    allocate = incoming.allocate

    def stall(*what: Any) -> Any:
        store.get("gave up")
        return allocate(*what)

    with coordinator.init(tp=2, rank=rank, store=store, timeout=30, torch_only=True) as groups:
        if rank == 0:
            two = {"x": torch.ones(2 << 20), "y": torch.ones(2 << 20)}
            with pytest.raises(GroupTimeoutError):
                groups.tp.broadcast_tensor_dict(two, timeout=1)
            store.set("gave up", "")
        else:
            with (
                patch.object(incoming, "allocate", stall),
                pytest.raises(GroupAbortedError, match="GroupTimeoutError"),
            ):
                groups.tp.broadcast_tensor_dict()
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.tp.barrier()


@pytest.mark.parametrize(
    ("body", "torch_only"),
    [(nothing_arrives, ()), (a_send_gives_up, (True,)), (a_send_gives_up, (False,)),
     (a_broadcast_gives_up, ())],
)  # fmt: skip
def test_a_blocking_call_that_gives_up_ends_the_group(body: Any, torch_only: Any) -> None:
    run_ranks(2, body, SharedStore(), *torch_only)
