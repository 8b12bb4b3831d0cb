"""Count the operations that this process begins within a pool's call, for each of its groups.

`device_comm.call_number` logs them. All members of a group know it by its name, its ranks and its
token, which differs between groups of the same name and ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from device_comm.call_number import OperationCounts, call_number

_CALLER_BYTES: Final = 16

GroupOperationCounts: TypeAlias = tuple[str, tuple[int, ...], bytes, bytes, tuple[int, ...]]
"""A group's name, its members' global ranks, its token, and the parts of `OperationCounts.take`."""


@dataclass(slots=True)
class Entry:
    """A group whose operations are counted; `close` it with the group."""

    name: str
    ranks: tuple[int, ...]
    token: bytes
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


def enter(name: str, ranks: Sequence[int], token: bytes, begun: OperationCounts) -> Entry:
    """Count the operations of a new group."""
    entry = Entry(name, tuple(ranks), token, begun)
    _entries.append(entry)
    return entry


def forget_groups() -> None:
    """Remove all entries."""
    _entries.clear()


def take_operation_counts() -> tuple[GroupOperationCounts, ...]:
    """Return and reset the counts of all groups that began an operation."""
    taken = []
    for entry in tuple(_entries):
        counted = entry.begun.take()
        if any(counted):
            taken.append((entry.name, entry.ranks, entry.token, *counted))
        if entry.closed:
            _entries.remove(entry)
    return tuple(taken)
