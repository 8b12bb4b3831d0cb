"""The count and checksum of each member's collectives in a group, compared between members.

An open group has an entry per member: see `device_comm.divergence`. A closed group's entry keeps
count and checksum until another group takes it; the longest free entry is taken first.
`shm_broadcast.layout` has its layout; boards without histories have no fingerprints. Fingerprints
of other hosts arrive with heartbeats (`RemoteMembers`).

Count and digest belong together, and to that group: they are one word, and the entry's group is
checked before and after reading it. `Fingerprint.last` may be torn: its user has to verify it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes

_log = logging.getLogger(__name__)


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """The sum of one member's collectives in one group."""

    group: int  # the number by which its members identify the group
    count: int  # of collectives, modulo 2**32
    digest: int  # a 32-bit checksum of all collectives
    last: bytes  # describes the last one, without trailing zeros; may be torn or outdated
    closed: bool = False  # whether the member has closed the group


class Fingerprints:
    """A member's fingerprints, and the other members'. Any thread may use it.

    ``comparing`` lists functions that are called now and then during each wait on the board.
    """

    def __init__(
        self,
        memory: SharedBytes,
        received: Callable[[int], Sequence[Fingerprint] | None],
        member: int | None,
        n_members: int,
    ) -> None:
        """Use a board's fingerprints; a process without a ``member`` only reads.

        ``received`` returns a remote member's fingerprints; None for a member on this host.
        """
        self._memory = memory
        self._words = memory.words
        self._remote = received
        self._n_members = n_members
        # First in, first out: a late writer writes to an entry that is still free.
        self._free = deque(() if member is None else self._entries(member))
        self._full = not self._free
        self.comparing: list[Callable[[], None]] = []

    def forget(self, member: int) -> None:
        """Clear the entries of ``member``'s last process."""
        for entry in self._entries(member):
            self._words.write(entry, bytes(layout.FINGERPRINT_STRIDE))

    def allocate(self, group: int) -> int:
        """Return an entry for ``group``, until `close`; 0 if all are in use."""
        try:
            entry = self._free.popleft()
        except IndexError:
            if not self._full:
                self._full = True
                _log.warning(
                    "calls are compared in %d open groups at once; in further ones they are not",
                    layout.FINGERPRINTS,
                )
            return 0
        # First 0: no reader may see a group with the cleared word.
        self._words.store64(entry + layout.FINGERPRINT_GROUP, 0)
        self._words.store64(entry + layout.FINGERPRINT_WORD, 0)
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group)
        return entry

    def publish(self, entry: int, count: int, digest: int, last: bytes | None) -> None:
        """Store the fingerprint of an entry; the count may exceed 32 bits.

        ``last`` has 48 bytes; None: it is unchanged.
        """
        if last is not None:
            self._words.write(entry + layout.FINGERPRINT_LAST, last)
        self._words.store64(entry + layout.FINGERPRINT_WORD, (count & 0xFFFFFFFF) << 32 | digest)

    def close(self, entry: int) -> None:
        """Mark the group as closed by this member, and free the entry."""
        group = self._words.load64(entry + layout.FINGERPRINT_GROUP)
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group | layout.FINGERPRINT_CLOSED)
        self._free.append(entry)

    def closed(self, group: int, member: int) -> bool:
        """Return whether a member is known to have closed ``group``."""
        return any(each.closed for each in self.of_member(member) if each.group == group)

    def of_member(self, member: int) -> Sequence[Fingerprint]:
        """Return a member's fingerprints, the last received ones if it is on another host."""
        remote = self._remote(member)
        return self._local(member) if remote is None else remote

    def compare(self) -> None:
        """Call all functions in ``comparing``."""
        for each in tuple(self.comparing):
            each()

    def _local(self, member: int) -> list[Fingerprint]:
        words, fingerprints = self._words, []
        for entry in self._entries(member):
            owner = words.load64(entry + layout.FINGERPRINT_GROUP)
            if not owner:
                continue
            word = words.load64(entry + layout.FINGERPRINT_WORD)
            begin = entry + layout.FINGERPRINT_LAST
            last = bytes(self._memory.memory[begin : begin + layout.FINGERPRINT_LAST_BYTES])
            group, closed = owner & ~layout.FINGERPRINT_CLOSED, owner >= layout.FINGERPRINT_CLOSED
            if (word or closed) and words.load64(entry + layout.FINGERPRINT_GROUP) == owner:
                count, digest = word >> 32, word & 0xFFFFFFFF
                fingerprints.append(Fingerprint(group, count, digest, last.rstrip(b"\0"), closed))
        return fingerprints

    def _entries(self, member: int) -> range:
        if not self._words.load32(layout.BOARD_HISTORY):
            return range(0)
        begin = layout.fingerprints_slot(member, self._n_members)
        return range(
            begin,
            begin + layout.FINGERPRINTS * layout.FINGERPRINT_STRIDE,
            layout.FINGERPRINT_STRIDE,
        )
