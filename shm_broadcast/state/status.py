"""A member's published status, for inspection: its place, groups, waits, and stack file.

No member reads it. It does not slow operations: a thread that is about to sleep publishes a wait
that has lasted for a while. `shm_broadcast.layout` has its layout.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes, read_text, text_of, write_text

_MEMBERS: Final = struct.Struct(f"<{layout.WAIT_NAMED}H")
_MEMBERSHIP: Final = struct.Struct(layout.MEMBERSHIP_FORMAT)


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


class PublishedStatus:
    """The status slot of one member, written by its process only. Any thread may use it."""

    def __init__(self, memory: SharedBytes, member: int, n_members: int) -> None:
        """Clear the status of the slot's last owner."""
        self._memory = memory
        self._slot = layout.status_slot(member, n_members)
        memory.words.write(self._slot, bytes(layout.STATUS_STRIDE))
        waits = self._slot + layout.STATUS_WAITS
        # Each operation of a deque is atomic: threads need no lock.
        self._free = deque(waits + index * layout.WAIT_STRIDE for index in range(layout.WAITS))

    def publish_stacks(self, descriptor: int) -> None:
        """Publish the descriptor of this process's stack file."""
        self._memory.words.store32(self._slot + layout.STATUS_STACKS, descriptor + 1)

    def publish_place(self, group: str, rank: int) -> None:
        """Add that this member is ``rank`` in ``group``."""
        at = self._slot + layout.STATUS_PLACE
        before, own = read_text(self._memory, at, layout.STATUS_PLACE_BYTES), f"{group} {rank}"
        place = f"{before}, {own}" if before else own
        if own not in before.split(", ") and len(place.encode()) <= layout.STATUS_PLACE_BYTES:
            write_text(self._memory, at, place, layout.STATUS_PLACE_BYTES)

    def publish_group(self, name: str, rank: int, size: int, first: int, more: int) -> None:
        """Count this member's group as opened (``more`` 1) or closed (-1).

        There are 16 entries; closed groups make room.
        """
        group = _MEMBERSHIP.pack(size, rank, first, name.encode(), 0)[:-1]
        begin, stride = self._slot + layout.STATUS_MEMBERSHIPS, layout.MEMBERSHIP_STRIDE
        entries = {
            at: bytes(self._memory.memory[at : at + stride])
            for at in range(begin, begin + layout.MEMBERSHIPS * stride, stride)
        }
        places = [at for at, entry in entries.items() if entry[:-1] == group]
        if not places and more > 0:  # an unused entry, or else a closed group's
            unused = [at for at, entry in entries.items() if not entry[-1]]
            places = sorted(unused, key=lambda at: any(entries[at]))
        if places:
            n_open = min(max(entries[places[0]][-1] + more, 0), 255)
            self._memory.words.write(places[0], group + bytes([n_open]))

    def begin_wait(self) -> int:
        """Return an entry for `publish_wait`, until `end_wait`; 0 if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            return 0

    def publish_wait(self, entry: int, operation: str, since: int, members: Sequence[int]) -> None:
        """Publish a wait since ``since`` (monotonic ns) for ``members``.

        Call `end_wait` for ``entry`` even if this raises.
        """
        memory, words, named = self._memory, self._memory.words, members[: layout.WAIT_NAMED]
        words.write(
            entry + layout.WAIT_MEMBERS,
            _MEMBERS.pack(*named, *[0] * (_MEMBERS.size // 2 - len(named))),
        )
        words.store32(entry + layout.WAIT_COUNT, len(members))
        write_text(memory, entry + layout.WAIT_OPERATION, operation, layout.OPERATION_BYTES)
        words.store64(entry + layout.WAIT_SINCE, since)

    def end_wait(self, entry: int) -> None:
        """Remove a published wait, and free its entry."""
        self._memory.words.store64(entry + layout.WAIT_SINCE, 0)
        self._free.append(entry)


def read_place(memory: SharedBytes, member: int, n_members: int) -> str:
    """Return the published place, such as ``"tp 0, pp 1"``."""
    at = layout.status_slot(member, n_members) + layout.STATUS_PLACE
    return read_text(memory, at, layout.STATUS_PLACE_BYTES)


def read_groups(memory: SharedBytes, member: int, n_members: int) -> tuple[Membership, ...]:
    """Return the published groups."""
    begin, groups = layout.status_slot(member, n_members) + layout.STATUS_MEMBERSHIPS, []
    for entry in range(layout.MEMBERSHIPS):
        size, rank, first, name, n_open = _MEMBERSHIP.unpack_from(
            memory.memory, begin + entry * layout.MEMBERSHIP_STRIDE
        )
        if size:
            groups.append(Membership(text_of(name), rank, size, first, not n_open))
    return tuple(groups)


def read_stacks_descriptor(memory: SharedBytes, member: int, n_members: int) -> int | None:
    """Return the published descriptor of the stack file, or None."""
    at = layout.status_slot(member, n_members) + layout.STATUS_STACKS
    return memory.words.load32(at) - 1 if memory.words.load32(at) else None


def read_waits(memory: SharedBytes, member: int, n_members: int) -> tuple[Wait, ...]:
    """Return the published waits of a member, the longest first."""
    words, waits = memory.words, []
    begin = layout.status_slot(member, n_members) + layout.STATUS_WAITS
    for entry in range(begin, begin + layout.WAITS * layout.WAIT_STRIDE, layout.WAIT_STRIDE):
        since = words.load64(entry + layout.WAIT_SINCE)
        if since:
            count = words.load32(entry + layout.WAIT_COUNT)
            named = _MEMBERS.unpack_from(memory.memory, entry + layout.WAIT_MEMBERS)[:count]
            operation = read_text(memory, entry + layout.WAIT_OPERATION, layout.OPERATION_BYTES)
            seconds = max(time.monotonic_ns() - since, 0) / 1e9
            members = tuple(each for each in named if each < n_members)
            waits.append(Wait(operation, seconds, members, count))
    return tuple(sorted(waits, key=lambda wait: -wait.seconds))
