"""Tries backends one after the other, with the same outcome on all members of a group.

Each backend is tried in two steps: what a member can check alone, then the set-up with the others.
The second step begins only when all members have passed the first, so that nobody waits for a
member that cannot take part. A backend that one member cannot use is refused on all of them, with
that member's reason. `device_comm.choosing.selecting_backend` chooses among the rest, by a table of
times that was measured on this kind of machine before, or is measured now.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import msgspec

from device_comm.choosing.measuring import MEASURED_SIZES, measure_candidates
from device_comm.choosing.selecting_backend import SelectingBackend
from device_comm.choosing.selection import Candidate, Selection, Table
from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from device_comm import Backend
    from device_comm.choosing.cache import Key, TableCache
    from device_comm.cuda.agree import Swap

T = TypeVar("T")
_TABLE = msgspec.msgpack.Decoder(Table | None)


def try_together(
    name: str,
    prepare: Callable[[], T],
    build: Callable[[T], Backend],
    swap: Swap,
    closing: ExitStack,
) -> Candidate:
    """Build one backend on all members, or on none.

    Args:
        name: the candidate's name.
        prepare: the step that a member does alone; its result is passed to ``build``.
        build: sets the backend up together with the other members.
        swap: gives this member's bytes to all members, and returns everyone's, by rank.
        closing: closes the backend, if one was built.

    Returns:
        The candidate, with the backend, or with the reason why there is none.

    Collective: yes, every member.
    """
    ready: list[T] = []
    refused = _first_refusal(swap, _attempt(lambda: ready.append(prepare())))
    if refused:
        return Candidate(name, None, refused)
    built: list[Backend] = []
    refused = _first_refusal(swap, _attempt(lambda: built.append(build(ready[0]))))
    for backend in built:
        if refused:
            backend.close()
        else:
            closing.callback(backend.close)
    return Candidate(name, None if refused else built[0], refused)


def select(
    candidates: Sequence[Candidate],
    key: Key,
    cache: TableCache,
    swap: Swap,
    sizes: Mapping[str, Sequence[int]] = MEASURED_SIZES,
    limit: float = math.inf,
) -> SelectingBackend:
    """A backend that chooses among ``candidates``, for each operation, by rank 0's table.

    Args:
        candidates: the same on all members, in order of preference; at least one is not refused.
        key: the machine and the group for which the table must have been measured; rank 0's.
        cache: where rank 0 looks for a table, and stores a new one.
        swap: gives this member's bytes to all members, and returns everyone's, by rank.
        sizes: the sizes that a table shall have, in bytes, by verb.
        limit: seconds to measure what it lacks. What does not fit is measured at the next set-up;
            until then the nearest size decides, and without any the order of the candidates.

    Collective: yes, every member.
    """
    if sum(each.backend is not None for each in candidates) < 2:
        return SelectingBackend(Selection(candidates))
    known = _TABLE.decode(swap(msgspec.msgpack.encode(cache.load(key)))[0])
    mine = measure_candidates(candidates, key.as_dict(), swap, sizes, known=known, limit=limit)
    table = _TABLE.decode(swap(msgspec.msgpack.encode(mine))[0])
    if table == mine != known:
        cache.store(table, key)
    return SelectingBackend(Selection(candidates, table))


def _attempt(step: Callable[[], object]) -> str:
    """Run ``step``; the reason if it raises a `CoordinatorError`, else ``""``."""
    try:
        step()
    except CoordinatorError as error:
        return str(error) or type(error).__name__
    return ""


def _first_refusal(swap: Swap, reason: str) -> str:
    """The reason of the first member that has failed; ``""`` if none has. Collective: yes."""
    reasons = [each.decode() for each in swap(reason.encode())]
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
