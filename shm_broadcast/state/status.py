"""What a member tells outside observers on its board: its place, its waits, and where its stack is.

No member reads it, and it does not slow the awaited operation: a wait is published only once it has
lasted for a while, by a thread that would otherwise sleep. `shm_broadcast.layout` has its layout.
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
    """What a thread of a member waits for.

    Attributes:
        operation: what it is in.
        seconds: how long.
        members: the member numbers that it waits for, the first 32 of them; () if that is not said.
        count: how many they are.
    """

    operation: str
    seconds: float
    members: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Membership:
    """What a member is in a group.

    Attributes:
        name: the group's, the first 23 bytes of it.
        rank: its rank there.
        size: the group's.
        first: what the group's rank 0 is called; groups of one name differ in it.
        closed: whether the member has closed it; no part of what the group is.
    """

    name: str
    rank: int
    size: int
    first: int
    closed: bool = field(default=False, compare=False)


class PublishedStatus:
    """The outward slot of one member, written by its process only. Any thread may use it."""

    def __init__(self, memory: SharedBytes, member: int, n_members: int) -> None:
        """Clear what the slot's last owner has left."""
        self._memory = memory
        self._slot = layout.status_slot(member, n_members)
        memory.words.write(self._slot, bytes(layout.STATUS_STRIDE))
        waits = self._slot + layout.STATUS_WAITS
        # Taking and giving back are each one atomic step of a deque: threads need no lock.
        self._free = deque(waits + index * layout.WAIT_STRIDE for index in range(layout.WAITS))

    def publish_stacks(self, descriptor: int) -> None:
        """Say to which descriptor this process writes its stacks when it is asked to."""
        self._memory.words.store32(self._slot + layout.STATUS_STACKS, descriptor + 1)

    def publish_place(self, group: str, rank: int) -> None:
        """Say that this member is ``rank`` in ``group``, beside what was said before."""
        at = self._slot + layout.STATUS_PLACE
        said, own = read_text(self._memory, at, layout.STATUS_PLACE_BYTES), f"{group} {rank}"
        place = f"{said}, {own}" if said else own
        if own not in said.split(", ") and len(place.encode()) <= layout.STATUS_PLACE_BYTES:
            write_text(self._memory, at, place, layout.STATUS_PLACE_BYTES)

    def publish_group(self, name: str, rank: int, size: int, first: int, more: int) -> None:
        """Say that this member has opened (1 ``more``) or closed (-1) a group, as its ``rank``.

        16 groups are said; those that were closed make room.
        """
        said = _MEMBERSHIP.pack(size, rank, first, name.encode(), 0)[:-1]
        begin, stride = self._slot + layout.STATUS_MEMBERSHIPS, layout.MEMBERSHIP_STRIDE
        entries = {
            at: bytes(self._memory.memory[at : at + stride])
            for at in range(begin, begin + layout.MEMBERSHIPS * stride, stride)
        }
        places = [at for at, there in entries.items() if there[:-1] == said]
        if not places and more > 0:  # one that was never used, or else one whose group is closed
            unused = [at for at, there in entries.items() if not there[-1]]
            places = sorted(unused, key=lambda at: any(entries[at]))
        if places:
            n_open = min(max(entries[places[0]][-1] + more, 0), 255)
            self._memory.words.write(places[0], said + bytes([n_open]))

    def begin_wait(self) -> int:
        """An entry for `publish_wait`, until `end_wait`; 0 if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            return 0

    def publish_wait(self, entry: int, operation: str, since: int, members: Sequence[int]) -> None:
        """Say what a thread waits for.

        Args:
            entry: what `begin_wait` gave; for it `end_wait` is called, whatever this raises.
            operation: what the thread is in.
            since: when it began to wait: ns on the monotonic clock.
            members: the member numbers that it waits for now.
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
        """Take back what `publish_wait` has said."""
        self._memory.words.store64(entry + layout.WAIT_SINCE, 0)
        self._free.append(entry)


def read_place(memory: SharedBytes, member: int, n_members: int) -> str:
    """What `PublishedStatus.publish_place` has said: ``"tp 0, pp 1"``."""
    at = layout.status_slot(member, n_members) + layout.STATUS_PLACE
    return read_text(memory, at, layout.STATUS_PLACE_BYTES)


def read_groups(memory: SharedBytes, member: int, n_members: int) -> tuple[Membership, ...]:
    """What `PublishedStatus.publish_group` has said."""
    begin, found = layout.status_slot(member, n_members) + layout.STATUS_MEMBERSHIPS, []
    for entry in range(layout.MEMBERSHIPS):
        size, rank, first, name, n_open = _MEMBERSHIP.unpack_from(
            memory.memory, begin + entry * layout.MEMBERSHIP_STRIDE
        )
        if size:
            found.append(Membership(text_of(name), rank, size, first, not n_open))
    return tuple(found)


def read_stacks_descriptor(memory: SharedBytes, member: int, n_members: int) -> int | None:
    """What `PublishedStatus.publish_stacks` has said; None if nothing."""
    at = layout.status_slot(member, n_members) + layout.STATUS_STACKS
    return memory.words.load32(at) - 1 if memory.words.load32(at) else None


def read_waits(memory: SharedBytes, member: int, n_members: int) -> tuple[Wait, ...]:
    """What the threads of a member wait for, the longest wait first."""
    words, found = memory.words, []
    waits = layout.status_slot(member, n_members) + layout.STATUS_WAITS
    for entry in range(waits, waits + layout.WAITS * layout.WAIT_STRIDE, layout.WAIT_STRIDE):
        since = words.load64(entry + layout.WAIT_SINCE)
        if since:
            count = words.load32(entry + layout.WAIT_COUNT)
            named = _MEMBERS.unpack_from(memory.memory, entry + layout.WAIT_MEMBERS)[:count]
            operation = read_text(memory, entry + layout.WAIT_OPERATION, layout.OPERATION_BYTES)
            seconds = max(time.monotonic_ns() - since, 0) / 1e9
            within = tuple(each for each in named if each < n_members)
            found.append(Wait(operation, seconds, within, count))
    return tuple(sorted(found, key=lambda wait: -wait.seconds))
