"""The count and checksum of each member's collectives in a group, for the others to compare.

While a group is open, it has an entry for its tally: see `device_comm.divergence`. When it is
closed, the entry says so, and keeps count and checksum until another group takes it; the entry that
has been free for longest is taken first. `shm_broadcast.layout` has an entry's layout; boards
without histories have no tallies. Those of members on other hosts come with their beats
(`RemoteMembers`).

Guarantees: count and digest belong together, and to that group: they are one word, and the entry's
owner is checked before and after reading it. `Fingerprint.last` may be torn: its user has to
verify it.
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
    """What one member's collectives in one group have come to.

    Attributes:
        group: the number by which its members know the group.
        count: how many there were, modulo 2**32.
        digest: a checksum of all of them, 32 bits.
        last: what the last one was, without zeros at its end; maybe of another one, or torn.
        closed: whether the member has closed the group: there will be no more.
    """

    group: int
    count: int
    digest: int
    last: bytes
    closed: bool = False


class Fingerprints:
    """A member's tallies, and all that is known of the others'. Any thread may use it.

    Attributes:
        comparing: called now and then while this process waits for anything on the board.
    """

    def __init__(
        self,
        memory: SharedBytes,
        heard: Callable[[int], Sequence[Fingerprint] | None],
        member: int | None,
        n_members: int,
    ) -> None:
        """Of a board.

        Args:
            memory: the board's.
            heard: what was heard of a member; None: it is on this host.
            member: this process's; None: it only reads.
            n_members: of the board.
        """
        self._memory = memory
        self._words = memory.words
        self._remote = heard
        self._n_members = n_members
        # The one that was given back first is used first: a late writer finds it free.
        self._free = deque(() if member is None else self._entries(member))
        self._full = not self._free
        self.comparing: list[Callable[[], None]] = []

    def forget(self, member: int) -> None:
        """Clear what the last process that was ``member`` has left."""
        for entry in self._entries(member):
            self._words.write(entry, bytes(layout.FINGERPRINT_STRIDE))

    def allocate(self, group: int) -> int:
        """An entry for this member's tally of ``group``, until `close`; 0 if all are in use."""
        try:
            entry = self._free.popleft()
        except IndexError:
            if not self._full:
                self._full = True
                told = "calls are compared in %d open groups at once; in further ones they are not"
                _log.warning(told, layout.FINGERPRINTS)
            return 0
        self._words.store64(
            entry + layout.FINGERPRINT_GROUP, 0
        )  # so that no group is seen to have 0
        self._words.store64(entry + layout.FINGERPRINT_WORD, 0)
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group)
        return entry

    def publish(self, entry: int, count: int, digest: int, last: bytes | None) -> None:
        """Say what a tally is now.

        Args:
            entry: what `allocate` gave.
            count, digest: as of `Fingerprint`; any count.
            last: as of `Fingerprint`, 48 bytes; None: it is the same as before.
        """
        if last is not None:
            self._words.write(entry + layout.FINGERPRINT_LAST, last)
        self._words.store64(entry + layout.FINGERPRINT_WORD, (count & 0xFFFFFFFF) << 32 | digest)

    def close(self, entry: int) -> None:
        """Say that this member has closed the group, and give back what `allocate` gave."""
        group = self._words.load64(entry + layout.FINGERPRINT_GROUP)
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group | layout.FINGERPRINT_CLOSED)
        self._free.append(entry)

    def closed(self, group: int, member: int) -> bool:
        """Whether a member has closed ``group``, as far as it is known."""
        return any(each.closed for each in self.of_member(member) if each.group == group)

    def of_member(self, member: int) -> Sequence[Fingerprint]:
        """The tallies of a member, as last heard if it is on another host."""
        heard = self._remote(member)
        return self._here(member) if heard is None else heard

    def compare(self) -> None:
        """Have all compare that want to."""
        for each in tuple(self.comparing):
            each()

    def _here(self, member: int) -> list[Fingerprint]:
        words, found = self._words, []
        for entry in self._entries(member):
            said = words.load64(entry + layout.FINGERPRINT_GROUP)
            if not said:
                continue
            word = words.load64(entry + layout.FINGERPRINT_WORD)
            begin = entry + layout.FINGERPRINT_LAST
            last = bytes(self._memory.memory[begin : begin + layout.FINGERPRINT_LAST_BYTES])
            group, closed = said & ~layout.FINGERPRINT_CLOSED, said >= layout.FINGERPRINT_CLOSED
            if (word or closed) and words.load64(entry + layout.FINGERPRINT_GROUP) == said:
                count, digest = word >> 32, word & 0xFFFFFFFF
                found.append(Fingerprint(group, count, digest, last.rstrip(b"\0"), closed))
        return found

    def _entries(self, member: int) -> range:
        if not self._words.load32(layout.BOARD_HISTORY):
            return range(0)
        begin = layout.fingerprints_slot(member, self._n_members)
        return range(
            begin,
            begin + layout.FINGERPRINTS * layout.FINGERPRINT_STRIDE,
            layout.FINGERPRINT_STRIDE,
        )
