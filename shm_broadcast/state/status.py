"""A member's published status, for inspection: its place, groups, waits, and stack file.

No member reads it. It does not slow operations: a thread that is about to sleep publishes a wait
that has lasted for a while. The status is one record with a checksum, so a reader needs no order of
memory accesses: it detects a record that is being written.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

import msgspec

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes, text_of

PLACE_BYTES: Final = 56
"""The limit of a place."""
MAX_GROUPS: Final = 16
MAX_WAITS: Final = 4
MAX_NAMED: Final = 32
"""How many of the members that a wait is for are published."""

_HEADER: Final = struct.Struct("<II")
_ATTEMPTS: Final = 10
_HAS_WAITS: Final = 1 << 31
"""A bit of the record's size: without it the record's waits are over."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of one thread of a member."""

    operation: str
    seconds: float
    members: tuple[int, ...]  # the first 32 member numbers; () if unknown
    count: int  # of all members


@dataclass(frozen=True, slots=True)
class Membership:
    """A member's part in a group."""

    name: str  # the first 23 bytes
    rank: int
    size: int
    first: int  # the global rank of the group's rank 0; groups of one name differ in it
    closed: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PublishedStatus:
    """What a member publishes."""

    place: str = ""  # its ranks in its groups: "tp 0, pp 1"
    groups: tuple[Membership, ...] = ()  # closed ones included
    waits: tuple[Wait, ...] = ()  # of its threads, the longest first
    stacks: int | None = None  # the descriptor of its stack file


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(PublishedStatus).decode


class StatusPublisher:
    """Publishes the status of one member. Any thread of its process may use it."""

    def __init__(
        self, memory: SharedBytes, member: int, n_members: int, stacks: int | None
    ) -> None:
        """Replace the status of the slot's last owner; ``stacks`` as in `PublishedStatus`."""
        self._memory = memory
        self._slot = layout.status_slot(member, n_members)
        self._stacks = stacks
        self._place = ""
        self._groups: dict[Membership, int] = {}  # and how many of each are open
        self._waits: dict[Hashable, Wait] = {}
        self._size = 0
        self._changed = object()
        self._publish()

    def publish_place(self, group: str, rank: int) -> None:
        """Add that this member is ``rank`` in ``group``, if there is room for it."""
        places = [*filter(None, self._place.split(", ")), f"{group} {rank}"]
        place = ", ".join(dict.fromkeys(places))
        if len(place.encode()) <= PLACE_BYTES:
            self._place = place
            self._publish()

    def publish_group(self, name: str, rank: int, size: int, first: int, more: int) -> None:
        """Count this member's group as opened (``more`` 1) or closed (-1).

        There are 16 entries; closed groups make room.
        """
        group = Membership(_cut(name, layout.ENTRY_GROUP_BYTES), rank, size, first)
        if group not in self._groups:
            closed = [each for each, n_open in self._groups.items() if not n_open]
            full = len(self._groups) == MAX_GROUPS
            if more < 0 or (full and not closed):
                return
            if full:
                del self._groups[closed[0]]
        self._groups[group] = max(self._groups.get(group, 0) + more, 0)
        self._publish()

    def publish_wait(
        self, wait: Hashable, operation: str, since: int, members: Sequence[int]
    ) -> None:
        """Publish ``wait`` since ``since`` (monotonic ns) for ``members``; for none, remove it."""
        if members:
            name = _cut(operation, layout.OPERATION_BYTES)
            new = Wait(name, since / 1e9, tuple(members[:MAX_NAMED]), len(members))
            if self._waits.get(wait) != new:
                self._waits[wait] = new
                self._publish()
        elif self._waits.pop(wait, None) is not None:
            hidden = not self._waits and self._hide_waits()
            if self._waits or not hidden:  # another thread may have begun to wait meanwhile
                self._publish()

    def _hide_waits(self) -> bool:
        """Clear a bit: a thread that wakes up encodes no record. False: the record is another."""
        self._changed = object()  # a thread that writes a record now writes it again
        size = self._size
        return self._memory.words.compare_and_swap32(self._slot, size | _HAS_WAITS, size)

    def _publish(self) -> None:
        changed = self._changed = object()
        while True:
            counts = tuple(self._groups.items())
            groups = tuple(replace(group, closed=not n_open) for group, n_open in counts)
            waits = tuple(self._waits.values())[:MAX_WAITS]
            data = _encode(PublishedStatus(self._place, groups, waits, self._stacks))
            self._size = len(data)
            size = self._size | (_HAS_WAITS if waits else 0)
            self._memory.words.write(self._slot, _HEADER.pack(size, crc32(data)) + data)
            if self._changed is changed:
                return
            changed = self._changed  # by another thread, whose record this one may have replaced


def read_status(read: Callable[[int, int], bytes], member: int, n_members: int) -> PublishedStatus:
    """Return a member's published status; an empty one if its process was killed writing it.

    ``read`` returns the board's bytes, given their offset and number.
    """
    for _ in range(_ATTEMPTS):
        data = read(layout.status_slot(member, n_members), layout.STATUS_STRIDE)
        size, checksum = _HEADER.unpack_from(data)
        has_waits, size = bool(size & _HAS_WAITS), size & ~_HAS_WAITS
        record = data[_HEADER.size :][:size]
        if size and crc32(record) == checksum:
            status, now = _decode(record), time.monotonic()
            current = status.waits if has_waits else ()
            waits = [replace(each, seconds=max(now - each.seconds, 0)) for each in current]
            waits.sort(key=lambda wait: -wait.seconds)
            return replace(status, waits=tuple(waits))
    return PublishedStatus()


def _cut(text: str, size: int) -> str:
    return text_of(text.encode(errors="replace")[:size])
