"""A message or an exchange that is interrupted is whole, or ends its group; none are mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import coordinator
from coordinator.pipeline import Stage
from shm_broadcast import GroupAbortedError, MessageDecodeError, MessageRefusedError, PeerLostError
from tests.interruptions import Alarm, Interruption, alarm, interrupt, interruptions
from tests.patience import all_here
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator import GroupCoordinator, ParallelGroups
    from device_comm import Work

LAST = -1.0
REFUSED = -2.0
OVER = (GroupAbortedError, PeerLostError)
SECRET = b"s" * 32


def made_of(value: float) -> dict[str, Any]:
    """A tree of a frame, a rest and two tensors behind it, which can be cut; all hold ``value``."""
    tensors = {name: torch.full((5000,), value) for name in "ab"}
    return {"value": value, "text": str(value) * 1000, **tensors}


def value_of(tree: dict[str, Any]) -> float:
    value: float = tree["value"]
    assert tree["text"] == str(value) * 1000
    assert all(bool((tree[name] == value).all()) for name in "ab")
    return value


class End(NamedTuple):
    """One rank's end of the groups under test."""

    groups: ParallelGroups
    pp: GroupCoordinator
    stage: Stage


Call = Callable[[End, float], object]
Turn = Callable[[End, int, "Iterator[Any]"], bool]


def take_turns(
    rank: int, n: int, path: str, interrupted: Call | None, turn: Turn, **how: Any
) -> list[list[bool]]:
    """Have all ranks take ``turn`` until each place of ``interrupted`` has been interrupted.

    Returns:
        Whether that was the end of a group: for each turn, by rank.
    """
    every, handler = how.pop("every"), how.pop("handler", interrupt)
    store = dist.FileStore(path, n)
    ends: list[list[bool]] = []
    members: list[End] = []

    def end() -> End:
        if not members:
            meeting = dist.PrefixStore(f"{len(ends)}.", store)
            groups = coordinator.init(rank=rank, store=meeting, timeout=20, **how)
            all_here(meeting, n)  # all are connected before one of them ends a group
            slices = groups.tp if groups.tp.world_size > 1 else None
            members.append(End(groups, groups.pp, Stage(groups.pp, slices)))
        return members[0]

    places: Iterator[Any] = count()
    if interrupted is not None:
        places = interruptions(
            lambda: interrupted(end(), len(ends)), coordinator, handler=handler, every=every
        )
    while True:
        goes_on, over = True, False
        try:
            goes_on = turn(end(), len(ends), places)
        except OVER:
            over = True
        store.set(f"did {len(ends)}.{rank}", json.dumps([goes_on, over]))
        did = [json.loads(store.get(f"did {len(ends)}.{each}")) for each in range(n)]
        ends.append([over for _, over in did])
        if any(ends[-1]):
            members.pop().groups.close()
        if not all(goes_on for goes_on, _ in did):
            return ends


# --- messages of rank 0 to the others, each followed by a last one -------------------------


def gather(group: GroupCoordinator, value: float | None = None) -> Any:
    """What rank 0 has given, on all ranks."""
    return made_of(group.all_gather_object(value)[0])


def gather_later(group: GroupCoordinator, value: float | None = None) -> Any:
    return made_of(group.all_gather_object(value, async_op=True).wait()[0])


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("not to be sent")


def gather_unsendable(group: GroupCoordinator, value: float) -> Any:
    """As `gather_later`; rank 0 cannot send its value, except the last."""
    try:
        works = group.all_gather_object(value if value == LAST else Unsendable(), async_op=True)
        return made_of(works.wait()[0])
    except (MessageRefusedError, ValueError):
        return made_of(REFUSED)
    except MessageDecodeError as error:
        if not isinstance(error.__cause__, Alarm):
            raise


PAIRS: dict[str, tuple[Call, Callable[[End], Any]]] = {
    "message": (
        lambda end, value: end.pp.send_tensor_dict(made_of(value), dst=1),
        lambda end: end.pp.recv_tensor_dict(src=0),
    ),
    "broadcast": (
        lambda end, value: end.pp.broadcast_tensor_dict(made_of(value), src=0),
        lambda end: end.pp.broadcast_tensor_dict(src=0),
    ),
    "gathered": (lambda end, value: gather(end.pp, value), lambda end: gather(end.pp)),
    "gathered in the background": (
        lambda end, value: gather_later(end.pp, value),
        lambda end: gather_later(end.pp),
    ),
    "refused in the background": (
        lambda end, value: gather_unsendable(end.pp, value),
        lambda end: gather_unsendable(end.pp, LAST),
    ),
    "in the background": (
        lambda end, value: end.pp.broadcast_object(value, src=0, async_op=True).wait(),
        lambda end: made_of(end.pp.broadcast_object(src=0, async_op=True).wait()),
    ),
}


def pass_messages(
    rank: int, n: int, path: str, pair: str, interrupted: int, secret: bytes | None
) -> list[list[bool]]:
    send, receive = PAIRS[pair]
    received: list[float] = []
    refused = pair == "refused in the background"  # few interrupts leave its group open

    def own(end: End, value: float) -> None:
        if rank == 0:
            send(end, value)
        else:
            received.append(value_of(receive(end)))

    def turn(end: End, number: int, places: Iterator[Any]) -> bool:
        received.clear()
        goes_on = next(places, None) is not None
        if rank != interrupted:
            own(end, number)
        if rank == 0:
            send(end, LAST)
        while rank > 0 and LAST not in received:
            own(end, number)
        assert rank == 0 or received in ([number, LAST], [REFUSED, LAST], [LAST])
        end.pp.barrier()
        return goes_on

    return take_turns(
        *(rank, n, path, own if rank == interrupted else None, turn),
        every=n + 1 if refused else 6 if secret or n > 2 else 4,
        handler=alarm if refused else interrupt,
        pp=n,
        secret=secret,
        torch_only=secret is not None,
    )


@pytest.mark.parametrize(
    ("pair", "n", "interrupted", "secret"),
    [
        ("message", 2, 0, None),
        ("message", 2, 0, SECRET),
        ("message", 2, 1, None),
        ("message", 2, 1, SECRET),
        ("broadcast", 2, 0, None),
        ("broadcast", 2, 0, SECRET),
        ("broadcast", 2, 1, None),
        ("broadcast", 2, 1, SECRET),
        ("gathered", 2, 0, None),
        ("gathered in the background", 3, 0, None),
        ("gathered in the background", 3, 0, SECRET),
        ("refused in the background", 2, 0, SECRET),
        ("refused in the background", 3, 0, None),
        ("in the background", 3, 0, None),
    ],
    ids=lambda value: {None: "plain", SECRET: "sealed"}.get(value, str(value)),
)
def test_an_interrupt_anywhere_mixes_no_messages(
    store_path: str, pair: str, n: int, interrupted: int, secret: bytes | None
) -> None:
    found = run_ranks(n, pass_messages, store_path, pair, interrupted, secret, timeout=240)
    assert found == found[:1] * n
    assert {tuple(ranks) for ranks in found[0]} == {(True,) * n, (False,) * n}


# --- pipeline stages -----------------------------------------------------------------------

Receive = Callable[[End], Callable[[], Any]]
"""Makes a call that receives a tree."""


def waiting_twice(work: Work[Any]) -> Any:
    """After an interrupt a caller may wait again, as long as there is a group."""
    try:
        return work.wait()
    except Interruption:
        with suppress(*OVER):
            return work.wait()
        raise


def forward(end: End) -> Callable[[], Any]:
    return end.stage.recv_forward


def forward_later(end: End) -> Callable[[], Any]:
    return partial(waiting_twice, end.stage.recv_forward(async_op=True))


def receive_in_turns(
    rank: int, n: int, path: str, receive: Receive, interrupted: int
) -> list[list[bool]]:
    """Receive a tree, which is interrupted, and a last one; and again."""
    received: list[float] = []
    calls: list[Callable[[], Any]] = []

    def own(end: End, value: float) -> None:
        received.append(value_of(calls[-1]()))

    def turn(end: End, number: int, places: Iterator[Any]) -> bool:
        received.clear()
        if end.stage.is_first:
            end.stage.send_forward(made_of(float(number)))
            end.stage.send_forward(made_of(LAST))
            return True
        calls.append(receive(end))
        goes_on = next(places, None) is not None
        if rank != interrupted:
            own(end, number)
        while LAST not in received:
            calls.append(receive(end))
            own(end, number)
        assert received in ([number, LAST], [LAST])
        return goes_on

    first = own if rank == interrupted else None
    return take_turns(rank, n, path, first, turn, every=n + 1, pp=2, tp=n // 2)


@pytest.mark.parametrize(("receive", "n"), [(forward, 4), (forward_later, 2), (forward_later, 4)])
def test_an_interrupted_receiver_mixes_no_trees_and_no_slices(
    store_path: str, receive: Receive, n: int
) -> None:
    found = run_ranks(n, receive_in_turns, store_path, receive, n // 2, timeout=120)
    assert found == found[:1] * n
    ends = [any(ranks) for ranks in found[0]]
    assert False in ends
    # Another thread may receive all of a message without slices: then no interrupt ends the group.
    assert True in ends or (receive, n) == (forward_later, 2)


def exchange_in_turns(rank: int, n: int, path: str, both_ways: bool) -> list[list[bool]]:
    """Exchange trees, which is interrupted in rank 0, and exchange last ones; and again.

    Rank 1 sends how many it has received: the number of the exchange that rank 0's last one met.
    """
    received: list[float] = []

    def exchange(end: End, value: float) -> None:
        tree = made_of(value)
        if both_ways:
            trees = end.stage.exchange(tree, tree, recv_prev=True, recv_next=True)
            from_prev, from_next = map(value_of, trees)
            assert from_prev == from_next
        else:
            from_prev = value_of(end.stage.send_forward_recv_forward(tree))
        received.append(from_prev)

    def turn(end: End, _: int, places: Iterator[Any]) -> bool:
        received.clear()
        if rank == 1:
            while LAST not in received:
                exchange(end, float(len(received)))
            end.pp.send_object(len(received) - 1, 0)
            return True
        goes_on = next(places, None) is not None
        exchange(end, LAST)
        assert received[-1] == end.pp.recv_object(1)
        return goes_on

    first = (lambda end, _: exchange(end, 1.0)) if rank == 0 else None
    return take_turns(rank, n, path, first, turn, every=8, pp=2)


@pytest.mark.parametrize("both_ways", [False, True])
def test_an_interrupted_exchange_meets_no_other(store_path: str, both_ways: bool) -> None:
    found = run_ranks(2, exchange_in_turns, store_path, both_ways, timeout=120)
    assert found == found[:1] * 2
    assert {any(ranks) for ranks in found[0]} == {True, False}
