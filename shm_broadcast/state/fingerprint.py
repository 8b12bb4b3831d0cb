"""The logs of each member's last collectives in a group, compared between members.

An open group has an entry per member: see `device_comm.divergence`. A closed group's entry keeps
its log until another group takes it; the longest free entry is taken first. `shm_broadcast.layout`
has its layout; boards without histories have no fingerprints. Fingerprints of other hosts arrive
with heartbeats (`RemoteMembers`).

Number and digest of a collective belong together: they are one word. A log belongs to its group,
which is checked before and after reading it. Signatures may be torn: their user has to verify them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes

_log = logging.getLogger(__name__)
_STRIDE = layout.FINGERPRINT_STRIDE


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """One member's last collectives in one group."""

    group: int  # the number by which its members identify the group
    log: Annotated[bytes, msgspec.Meta(min_length=_STRIDE, max_length=_STRIDE)]
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
            self._words.write(entry, bytes(_STRIDE))

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
        # First 0: no reader may see a group with another group's log.
        self._words.store64(entry + layout.FINGERPRINT_GROUP, 0)
        self._words.fence()
        self._words.write(entry, bytes(_STRIDE))
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group)
        return entry

    def publish(self, entry: int, number: int, digest: int, signature: bytes) -> None:
        """Add collective ``number`` to the log of an entry."""
        at = entry + _collective(number)
        self._words.write(at + layout.COLLECTIVE_SIGNATURE, signature)
        self._words.store64(at + layout.COLLECTIVE_WORD, _word(number, digest))
        self._words.store64(entry + layout.LOG_COUNT, number)

    def differs(self, entries: Sequence[int], number: int, digest: int) -> bool:
        """Return whether a log has another collective ``number``, or others before it."""
        word, at = _word(number, digest), _collective(number) + layout.COLLECTIVE_WORD
        for entry in entries:
            theirs = self._words.load64(entry + at)
            if theirs != word and theirs >> 32 == word >> 32:
                return True
        return False

    def close(self, entry: int) -> None:
        """Mark the group as closed by this member, and free the entry."""
        group = self._words.load64(entry + layout.FINGERPRINT_GROUP)
        self._words.store64(entry + layout.FINGERPRINT_GROUP, group | layout.FINGERPRINT_CLOSED)
        self._free.append(entry)

    def of_group(self, group: int, member: int) -> Fingerprint | None:
        """Return a member's fingerprint in ``group``; None if it is unknown."""
        return next((each for each in self.of_member(member) if each.group == group), None)

    def closed(self, group: int, member: int) -> bool:
        """Return whether a member is known to have closed ``group``."""
        fingerprint = self.of_group(group, member)
        return fingerprint is not None and fingerprint.closed

    def local_entry(self, group: int, member: int) -> int:
        """Return the entry of a member on this host for ``group``; 0 if there is none."""
        load = self._words.load64
        entries = self._entries(member)
        return next((e for e in entries if load(e + layout.FINGERPRINT_GROUP) == group), 0)

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
            log = bytes(self._memory.memory[entry : entry + _STRIDE])
            words.fence()  # the log is read before the owner's second load
            if owner and words.load64(entry + layout.FINGERPRINT_GROUP) == owner:
                closed, group = divmod(owner, layout.FINGERPRINT_CLOSED)
                fingerprints.append(Fingerprint(group, log, bool(closed)))
        return fingerprints

    def _entries(self, member: int) -> range:
        if not self._words.load32(layout.BOARD_HISTORY):
            return range(0)
        begin = layout.fingerprints_slot(member, self._n_members)
        return range(begin, begin + layout.FINGERPRINTS * _STRIDE, _STRIDE)


def _collective(number: int) -> int:
    return layout.LOG_ENTRIES + number % layout.FINGERPRINT_ENTRIES * layout.COLLECTIVE_STRIDE


def _word(number: int, digest: int) -> int:
    return (number & 0xFFFFFFFF) << 32 | digest
