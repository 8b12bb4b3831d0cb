"""A checksum of all collectives of a rank in a group, so that ranks find out that they differ.

    digest 0 = 0       digest n = CRC-32 of the n-th collective's signature, begun with digest n - 1

Ranks that have called the same have the same digests. Once two have called something else, their
digests differ from there on (CRC-32 over the same bytes, begun differently, never ends alike).

Whoever is told the count and the digest of another rank compares it with its own digest of that
count, if it has come as far and that was not more than `KEPT` collectives ago: which of the two is
further does not matter, nor how old the news are. What cannot be compared says nothing. So ranks
are only said to differ when they have called something else.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from zlib import crc32

from device_comm.operation import ROOTED
from device_comm.shm.signature import SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.tallies import Tally

KEPT: Final = 1 << 14
"""Of how many collectives a rank knows what its digest was: of as many as gloo does in a second."""

_U32: Final = 0xFFFFFFFF
_WITHIN: Final = KEPT - 1

_ALIKE: Final = frozenset(
    {"all_reduce", "reduce_scatter", "reduce", "all_gather", "gather", "broadcast"}
)
"""The verbs to which all ranks give as many bytes."""


@dataclass(frozen=True, slots=True)
class Slip:
    """Where another rank has begun to call something else than this one.

    Attributes:
        first: the number of the first collective of which that may be so; the first is 1.
        last: the number of one behind which they differ; ``first``: it is that one.
        ours: this rank's signature of that one.
        theirs: the other's, of ``first`` if that is ``last``; ``b""``: not known.
    """

    first: int
    last: int
    ours: bytes
    theirs: bytes


class Chain:
    """The collectives of one rank in one group. Any thread may compare, one at a time may add.

    Attributes:
        count: how many there were.
    """

    def __init__(self, world_size: int) -> None:
        self.count = 0
        self._digests = array("I", bytes(4 * KEPT))
        self._called = [b""] * KEPT
        self._agreed = [0] * world_size

    def add(self, signature: bytes) -> int:
        """Count one more collective; the digest of all."""
        digest = crc32(signature, self._digests[self.count & _WITHIN])
        count = self.count + 1
        self._called[count & _WITHIN] = signature
        self._digests[count & _WITHIN] = digest
        self.count = count
        return digest

    @property
    def last(self) -> bytes:
        """The signature of the last one; ``b""`` if there was none."""
        return self._called[self.count & _WITHIN]

    def is_ahead_of(self, count: int) -> bool:
        """Whether there were more than ``count``, modulo 2**32, of another rank."""
        return 0 < (self.count - count) & _U32 < 1 << 31

    def digest(self, number: int) -> int | None:
        """The digest of the first ``number`` collectives; None: of more, or too long ago."""
        found = self._digests[number & _WITHIN]
        # After that, for meanwhile another thread may have used its place again.
        return found if 0 <= number <= self.count < number + _WITHIN else None

    def compare(self, rank: int, told: Tally) -> Slip | None:
        """Compare with what another rank has come to; None: it agrees, or nothing can be said.

        Args:
            rank: the other one.
            told: its tally of this group. `Tally.last` may be of another one, or torn.
        """
        count = self.count
        number = count - ((count - told.count) & _U32)
        ours = self.digest(number)
        if ours is None or number < 1:
            return None
        if ours == told.digest:
            self._agreed[rank] = max(self._agreed[rank], number)
            return None
        called = self._called[number & _WITHIN]
        theirs = told.last.ljust(SIGNATURE.size, b"\0")
        before = self.digest(number - 1)
        proven = before is not None and crc32(theirs, before) == told.digest
        if proven and len(theirs) == SIGNATURE.size:  # all before that was alike, then
            return Slip(number, number, called, theirs)
        return Slip(self._agreed[rank] + 1, number, called, b"")


def first_difference(
    ours: Iterable[PastOperation], theirs: Sequence[PastOperation], group: str, first: int
) -> tuple[PastOperation, PastOperation] | None:
    """The first collective of which two histories show that ranks have called different ones.

    Args:
        ours: a rank's last operations, the oldest first.
        theirs: another's.
        group: the group's name, as it stands there.
        first: the number of the first collective that may differ.
    """
    there = {each.number: each for each in theirs if _is_of(each, group)}
    for mine in ours:
        other = there.get(mine.number)
        if mine.number >= first and _is_of(mine, group) and other and _differ(mine, other):
            return mine, other
    return None


def _is_of(past: PastOperation, group: str) -> bool:
    return past.group == group and past.verb not in ("send", "recv")


def _differ(one: PastOperation, other: PastOperation) -> bool:
    return (one.verb, one.dtype) != (other.verb, other.dtype) or (
        (one.verb in ROOTED and one.peer != other.peer)
        or (one.verb in _ALIKE and one.size != other.size)
    )
