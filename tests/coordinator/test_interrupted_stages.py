"""Pipeline stages that are interrupted: a call is whole, or its groups are over; never mixed."""

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
from shm_broadcast import GroupAbortedError, PeerLostError
from tests.interruptions import Interruption, interruptions
from tests.patience import all_here
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator import ParallelGroups
    from device_comm import Work

LAST = -1.0
OVER = (GroupAbortedError, PeerLostError)


def made_of(value: float) -> dict[str, Any]:
    """A tree of which all parts tell the ``value``; two of them can be cut."""
    return {"value": value, **{name: torch.full((5000,), value) for name in "ab"}}


def value_of(tree: dict[str, Any]) -> float:
    value: float = tree["value"]
    assert {name: tree[name].unique().tolist() for name in "ab"} == {"a": [value], "b": [value]}
    return value


class End(NamedTuple):
    """One rank's end of a pipeline of two stages."""

    groups: ParallelGroups
    stage: Stage


Receive = Callable[[End], Callable[[], Any]]
"""Makes a call that receives a tree."""


def waiting_twice(work: Work[Any]) -> Any:
    """Who is interrupted while it waits may wait again, as long as there is a group."""
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


def in_slices(end: End) -> Callable[[], Any]:
    return partial(end.groups.pp.recv_tensor_dict, 0, end.groups.tp)


def in_slices_later(end: End) -> Callable[[], Any]:
    return partial(waiting_twice, end.groups.pp.irecv_tensor_dict(0, end.groups.tp))


def send(end: End, receive: Receive, value: float) -> None:
    if receive in (forward, forward_later):
        end.stage.send_forward(made_of(value))
    else:
        end.groups.pp.send_tensor_dict(made_of(value), all_gather_group=end.groups.tp)


def receive_in_turns(
    rank: int, n: int, path: str, receive: Receive, interrupted: int
) -> list[bool]:
    """Receive a tree, which is interrupted, and a last one; and again.

    Returns:
        Whether that was the end of a group, each time.
    """
    received: list[float] = []
    calls: list[Callable[[], Any]] = []

    def own(_: End) -> None:
        received.append(value_of(calls[-1]()))

    def turn(end: End, number: int, places: Iterator[Any]) -> bool:
        received.clear()
        if end.stage.is_first:
            send(end, receive, float(number))
            send(end, receive, LAST)
            return True
        calls.append(receive(end))
        goes_on = next(places, None) is not None
        if rank != interrupted:
            own(end)
        while LAST not in received:
            calls.append(receive(end))
            own(end)
        assert received in ([number, LAST], [LAST])
        return goes_on

    return turns(rank, n, path, own if rank == interrupted else None, turn, every=n // 2)


def exchange_in_turns(rank: int, n: int, path: str, both_ways: bool) -> list[bool]:
    """Exchange trees, which is interrupted in rank 0, and exchange last ones; and again.

    Rank 1 sends how many it has received. So rank 0 is told which one its last one met.
    """
    received: list[float] = []

    def exchange(end: End, value: float) -> None:
        if both_ways:
            trees = end.stage.exchange(
                made_of(value), made_of(value), recv_prev=True, recv_next=True
            )
            from_prev, from_next = map(value_of, trees)
            assert from_prev == from_next
        else:
            from_prev = value_of(end.stage.send_forward_recv_forward(made_of(value)))
        received.append(from_prev)

    def own(end: End) -> None:
        exchange(end, 1.0)

    def turn(end: End, _: int, places: Iterator[Any]) -> bool:
        received.clear()
        if rank == 1:
            while LAST not in received:
                exchange(end, float(len(received)))
            end.groups.pp.send_object(len(received) - 1, 0)
            return True
        goes_on = next(places, None) is not None
        exchange(end, LAST)
        assert received[-1] == end.groups.pp.recv_object(1)
        return goes_on

    return turns(rank, n, path, own if rank == 0 else None, turn, every=3)


def turns(
    rank: int,
    n: int,
    path: str,
    interrupted: Callable[[End], object] | None,
    turn: Callable[[End, int, Iterator[Any]], bool],
    *,
    every: int,
) -> list[bool]:
    """Have all ranks take ``turn`` until nothing of ``interrupted`` is left to be interrupted.

    Returns:
        Whether that was the end of a group, each time.
    """
    store = dist.FileStore(path, n)
    ends: list[bool] = []
    members: list[End] = []

    def end() -> End:
        if not members:
            meeting = dist.PrefixStore(f"{len(ends)}.", store)
            groups = coordinator.init(pp=2, tp=n // 2, rank=rank, store=meeting, timeout=20)
            all_here(meeting, n)  # all are connected before one of them ends a group
            members.append(End(groups, Stage(groups.pp, groups.tp if n > 2 else None)))
        return members[0]

    places: Iterator[Any] = count()
    if interrupted is not None:
        places = interruptions(lambda: interrupted(end()), coordinator, every=every)
    while True:
        goes_on, over = True, False
        try:
            goes_on = turn(end(), len(ends), places)
        except OVER:
            over = True
        store.set(f"told {len(ends)}.{rank}", json.dumps([goes_on, over]))
        told = [json.loads(store.get(f"told {len(ends)}.{each}")) for each in range(n)]
        ends.append(any(over for _, over in told))
        if ends[-1]:
            members.pop().groups.close()
        if not all(goes_on for goes_on, _ in told):
            return ends


@pytest.mark.parametrize(
    ("receive", "n"),
    [
        (forward, 4),
        (forward_later, 2),
        (forward_later, 4),
        (in_slices, 4),
        (in_slices_later, 4),
    ],
)
def test_an_interrupted_receiver_mixes_no_trees_and_no_slices(
    tmp_path: Path, receive: Receive, n: int
) -> None:
    path = str(tmp_path / "store")
    ends = run_ranks(n, receive_in_turns, path, receive, n // 2, timeout=120)
    assert ends == ends[:1] * n
    assert False in ends[0]
    # Another thread may receive all of a message without slices: then no interrupt ends the group.
    assert True in ends[0] or (receive, n) == (forward_later, 2)


@pytest.mark.parametrize("both_ways", [False, True])
def test_an_interrupted_exchange_meets_no_other(tmp_path: Path, both_ways: bool) -> None:
    ends = run_ranks(2, exchange_in_turns, str(tmp_path / "store"), both_ways, timeout=120)
    assert ends == ends[:1] * 2
    assert set(ends[0]) == {True, False}
