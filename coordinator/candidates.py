"""Trying backends one after the other, with the same outcome on all members of a group.

What a member can find out alone is asked of all first, so that nobody waits in a set-up that
some other member cannot take part in. A backend that any member cannot use is refused on all,
with that member's reason; `device_comm.SelectingComm` chooses among the others, by a table that
was measured on this kind of machine before, or is measured now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from device_comm.select import Candidate, Selection, Table
from device_comm.select_measure import SIZES, measure
from device_comm.selecting_comm import SelectingComm
from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from device_comm import DeviceCommunicator
    from device_comm.cuda.agree import Swap
    from device_comm.select_cache import Key, TableCache

T = TypeVar("T")


def try_together(
    name: str,
    prepare: Callable[[], T],
    build: Callable[[T], DeviceCommunicator],
    swap: Swap,
    closing: ExitStack,
) -> Candidate:
    """Build one backend on all members, or on none.

    Args:
        name: of the candidate.
        prepare: what this member can do alone; what it returns is given to ``build``.
        build: sets the backend up with the others, once all are prepared.
        swap: gives bytes of this member to all, and returns those of all, by rank.
        closing: what is built is closed with it.

    Collective: yes, every member.
    """
    ready: list[T] = []
    refused = _first_refusal(swap, _attempt(lambda: ready.append(prepare())))
    if refused:
        return Candidate(name, None, refused)
    built: list[DeviceCommunicator] = []
    refused = _first_refusal(swap, _attempt(lambda: built.append(build(ready[0]))))
    for comm in built:
        if refused:
            comm.close()
        else:
            closing.callback(comm.close)
    return Candidate(name, None if refused else built[0], refused)


def select(
    candidates: Sequence[Candidate],
    key: Key,
    cache: TableCache,
    swap: Swap,
    sizes: Mapping[str, Sequence[int]] = SIZES,
) -> SelectingComm:
    """Choose among ``candidates``, of which not all are refused, by rank 0's table.

    Args:
        candidates: the same on all members, in order of preference.
        key: what the table has to be good for; rank 0's counts.
        cache: where rank 0 looks for it, and keeps it.
        swap: gives bytes of this member to all, and returns those of all, by rank.
        sizes: what to measure if there is no table, in bytes, by verb.

    Collective: yes, every member.
    """
    if sum(each.comm is not None for each in candidates) < 2:
        return SelectingComm(Selection(candidates))
    known = swap(msgspec.msgpack.encode(cache.load(key)))[0]
    table = msgspec.msgpack.decode(known, type=Table | None)
    if table is None:
        mine = measure(candidates, key.as_dict(), sizes)
        table = msgspec.msgpack.decode(swap(msgspec.msgpack.encode(mine))[0], type=Table)
        if table == mine:
            cache.store(table, key)
    return SelectingComm(Selection(candidates, table))


def _attempt(step: Callable[[], object]) -> str:
    """Why ``step`` failed, or ``""``."""
    try:
        step()
    except CoordinatorError as error:
        return str(error) or type(error).__name__
    return ""


def _first_refusal(swap: Swap, reason: str) -> str:
    """What the first member says that has failed; ``""`` if none has."""
    reasons = [each.decode() for each in swap(reason.encode())]
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
