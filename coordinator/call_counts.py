"""Count the operations that this process begins within a pool's call, for each of its groups.

`device_comm.call_number` makes the fingerprints. A group's key is its name, its ranks and the
number of earlier groups with the same name and ranks. All members make their groups in the same
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
"""A group's name, its members' global ranks, its number among groups with the same name and ranks,
and the fingerprint of its operations, encoded by `device_comm.call_number`."""


@dataclass(slots=True)
class Entry:
    """A group whose operations are counted; `close` it with the group."""

    name: str
    ranks: tuple[int, ...]
    number: int
    begun: OperationCounts
    closed: bool = False

    def close(self) -> None:
        """Remove the entry; within a call, `take_operation_counts` removes it."""
        self.closed = True
        if not call_number() and self in _entries:
            _entries.remove(self)


_entries: list[Entry] = []
_serving: dict[int, bytes] = {}
"""The pool that this process serves: {rank in the pool: 16 bytes that identify the pool}."""
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def serve_calls(rank: int, secret: bytes) -> None:
    """Serve the calls of a pool as its ``rank``. Collective: yes, every rank of the pool.

    ``secret`` is known to the pool's ranks only; a one-way hash of it identifies the pool.
    """
    _serving.clear()
    _serving[rank] = blake2b(secret, digest_size=_CALLER_BYTES, person=b"calls").digest()


def caller_of(rank: int) -> bytes:
    """Return 16 bytes that identify the pool whose calls a group's member serves.

    Zero without a pool; random if the member's rank differs from its rank in the pool.
    """
    return _serving.get(rank, os.urandom(_CALLER_BYTES) if _serving else bytes(_CALLER_BYTES))


def enter(name: str, ranks: Sequence[int], begun: OperationCounts) -> Entry:
    """Count the operations of a new group."""
    key = name, tuple(ranks)
    entry = Entry(*key, _made[key], begun)
    _made[key] += 1
    _entries.append(entry)
    return entry


def forget_groups() -> None:
    """Remove all entries and number new groups from 0."""
    _entries.clear()
    _made.clear()


def take_operation_counts() -> tuple[GroupOperationCounts, ...]:
    """Return and reset the fingerprints of all groups that began an operation."""
    taken = []
    for entry in tuple(_entries):
        counted = entry.begun.take()
        if counted:
            taken.append((entry.name, entry.ranks, entry.number, counted))
        if entry.closed:
            _entries.remove(entry)
    return tuple(taken)
