"""The group operations that this process begins in a call, for each of its groups.

`device_comm.call_number` makes their fingerprints. A group is identified by its name, its ranks,
and the number of groups with the same name and ranks before it: all members make them in the same
order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from device_comm.call_number import OperationCounts, call_number

_CALLER_BYTES: Final = 16

GroupOperationCounts: TypeAlias = tuple[str, tuple[int, ...], int, bytes]
"""A group's name, its members' global ranks, its number among groups that have the same of both,
and the fingerprint of what was begun there, encoded by `device_comm.call_number`."""


@dataclass(slots=True)
class Entry:
    """A group whose operations are counted; `close` it with the group."""

    name: str
    ranks: tuple[int, ...]
    number: int
    begun: OperationCounts
    closed: bool = False

    def close(self) -> None:
        """Drop the entry; in a call, once its fingerprint was taken."""
        self.closed = True
        if not call_number() and self in _entries:
            _entries.remove(self)


_entries: list[Entry] = []
_serving: dict[int, bytes] = {}
"""By this process's rank in the pool whose calls it carries out: what names that pool."""
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def serve_calls(rank: int, secret: bytes) -> None:
    """Carry out the calls of a pool, as its ``rank``. Collective: yes, every rank of the pool.

    Args:
        rank: this process's rank in the pool.
        secret: what only the pool's ranks know; what is made of it does not give it away.
    """
    _serving.clear()
    _serving[rank] = blake2b(secret, digest_size=_CALLER_BYTES, person=b"calls").digest()


def caller_of(rank: int) -> bytes:
    """Whose calls a member of a new group carries out, to compare with the others: nobody's, or its
    pool's. If it has another rank in the group than in its pool, this is like no other member's.
    """
    return _serving.get(rank, os.urandom(_CALLER_BYTES) if _serving else bytes(_CALLER_BYTES))


def enter(name: str, ranks: Sequence[int], begun: OperationCounts) -> Entry:
    """Count the operations of a new group. Collective: no, but all members make the same groups."""
    alike = name, tuple(ranks)
    entry = Entry(*alike, _made[alike], begun)
    _made[alike] += 1
    _entries.append(entry)
    return entry


def forget_groups() -> None:
    """Count no operations of the groups made so far, and number new ones from 0. Collective: no."""
    _entries.clear()
    _made.clear()


def take_operation_counts() -> tuple[GroupOperationCounts, ...]:
    """Fingerprints since the last call, of the groups that began anything. Collective: no."""
    taken = []
    for entry in tuple(_entries):
        counted = entry.begun.take()
        if counted:
            taken.append((entry.name, entry.ranks, entry.number, counted))
        if entry.closed:
            _entries.remove(entry)
    return tuple(taken)
