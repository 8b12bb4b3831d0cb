"""Messages whose sender or receiver is interrupted: whole, or the end of the group; never mixed."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import coordinator
from coordinator.pipeline import Stage
from shm_broadcast import GroupAbortedError, MessageDecodeError, MessageRefusedError, PeerLostError
from tests.interruptions import Alarm, alarm, interrupt, interruptions
from tests.patience import all_here
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from coordinator import GroupCoordinator

LAST = -1.0
REFUSED = -2.0


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("not to be sent")


class Pair(NamedTuple):
    """How rank 0 sends a dict, and the others receive it."""

    send: Callable[[GroupCoordinator, dict[str, Any]], object]
    receive: Callable[[GroupCoordinator], Any]


def made_of(value: float) -> dict[str, Any]:
    """A dict of a frame, a rest and two tensors behind it, all of which tell the ``value``."""
    tensors = {name: torch.full((5000,), value) for name in "ab"}
    return {"value": value, "text": str(value) * 1000, **tensors}


def gather(group: GroupCoordinator, values: dict[str, Any]) -> Any:
    """What rank 0 has given, on all ranks."""
    return made_of(group.all_gather_object(values.get("value"))[0])


def gather_later(group: GroupCoordinator, values: dict[str, Any]) -> Any:
    return made_of(group.all_gather_object(values.get("value"), async_op=True).wait()[0])


def gather_unsendable(group: GroupCoordinator, values: dict[str, Any]) -> Any:
    """As `gather_later`, of what rank 0 cannot send, but for the last."""
    given = values.get("value")
    try:
        works = group.all_gather_object(given if given == LAST else Unsendable(), async_op=True)
        return made_of(works.wait()[0])
    except (MessageRefusedError, ValueError):
        return made_of(REFUSED)
    except MessageDecodeError as error:
        if not isinstance(error.__cause__, Alarm):
            raise


@cache
def stage_of(group: GroupCoordinator) -> Stage:
    """One end of a pipeline, as long as its group lasts."""
    return Stage(group)


PAIRS = {
    "message": Pair(lambda g, x: g.send_tensor_dict(x, dst=1), lambda g: g.recv_tensor_dict(src=0)),
    "forward": Pair(lambda g, x: stage_of(g).send_forward(x), lambda g: stage_of(g).recv_forward()),
    "broadcast": Pair(
        lambda g, x: g.broadcast_tensor_dict(x, src=0), lambda g: g.broadcast_tensor_dict(src=0)
    ),
    "gathered": Pair(gather, lambda g: gather(g, {})),
    "gathered in the background": Pair(gather_later, lambda g: gather_later(g, {})),
    "refused in the background": Pair(
        gather_unsendable, lambda g: gather_unsendable(g, {"value": LAST})
    ),
    "in the background": Pair(
        lambda g, x: g.broadcast_object(x["value"], src=0, async_op=True).wait(),
        lambda g: made_of(g.broadcast_object(src=0, async_op=True).wait()),
    ),
}


def value_of(values: dict[str, Any]) -> float:
    value: float = values["value"]
    assert values["text"] == str(value) * 1000
    assert all(bool((values[name] == value).all()) for name in "ab")
    return value


def pass_messages(
    rank: int,
    n: int,
    path: str,
    pair: str,
    interrupted: int,
    handler: Callable[[], object],
    secret: bytes | None,
) -> list[bool]:
    """Pass a message that ``handler`` interrupts in rank ``interrupted``, and another; and again.

    Returns:
        Whether that was the end of the group, each time.
    """
    store = dist.FileStore(path, n)
    ends: list[bool] = []
    groups: list[coordinator.ParallelGroups] = []

    def group() -> GroupCoordinator:
        if not groups:
            meeting = dist.PrefixStore(f"{len(ends)}.", store)
            sealed: Any = {"secret": secret, "torch_only": secret is not None}
            groups.append(coordinator.init(tp=n, rank=rank, store=meeting, timeout=20, **sealed))
            all_here(meeting, n)  # all are connected before one of them ends the group
        return groups[0].tp

    def send() -> None:
        PAIRS[pair].send(group(), made_of(len(ends)))

    def receive() -> None:
        received.append(value_of(PAIRS[pair].receive(group())))

    received: list[float] = []
    own = send if rank == 0 else receive
    places: Iterator[Any] = count()
    if rank == interrupted:
        # What three ranks do is mostly what two do, and takes twice as long; sealed, four times.
        every = (n - 1) * (3 if secret else 1)
        places = interruptions(own, coordinator, handler=handler, every=every)
    while True:
        group()
        received.clear()
        goes_on = next(places, None) is not None
        try:
            if rank != interrupted:
                own()
            if rank == 0:
                PAIRS[pair].send(group(), made_of(LAST))
            while rank > 0 and LAST not in received:
                receive()
            assert rank == 0 or received in ([len(ends), LAST], [REFUSED, LAST], [LAST])
            group().barrier()
            ended = False
        except (GroupAbortedError, PeerLostError):
            ended = True
        if rank == interrupted:
            store.set(f"goes on {len(ends)}", str(goes_on))
        if store.get(f"goes on {len(ends)}") != b"True":
            return ends
        if ended:
            groups.pop().close()
        ends.append(ended)


@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["", "sealed"])
@pytest.mark.parametrize(
    ("pair", "n", "interrupted", "handler"),
    [
        ("message", 2, 0, interrupt),
        ("message", 2, 1, interrupt),
        ("forward", 2, 0, interrupt),
        ("forward", 2, 1, interrupt),
        ("broadcast", 2, 0, interrupt),
        ("broadcast", 2, 1, interrupt),
        ("gathered", 2, 0, interrupt),
        ("gathered in the background", 3, 0, interrupt),
        ("refused in the background", 2, 0, alarm),
        ("refused in the background", 3, 0, alarm),
        ("in the background", 3, 0, interrupt),
    ],
)
def test_an_interrupt_anywhere_mixes_no_messages(
    tmp_path: Path,
    pair: str,
    n: int,
    interrupted: int,
    handler: Callable[[], object],
    secret: bytes | None,
) -> None:
    path = str(tmp_path / "store")
    ends = run_ranks(n, pass_messages, path, pair, interrupted, handler, secret, timeout=240)
    assert ends == ends[:1] * n
    assert set(ends[0]) == {True, False}
