"""Which members have reached a collective, for transports that do not report this.

Each member notes on its board which collective of its group it has begun (`Arrivals.begin`). So a
member that waits in vain can name those that are behind.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.watch import Watch

_COUNT_BITS: Final = 32
_GROUP_BITS: Final = 20
"""Together less than 53, so that the number stays whole in JSON."""

_made: WeakKeyDictionary[Watch, Counter[tuple[str, tuple[int, ...]]]] = WeakKeyDictionary()
"""How many groups of a name and members were made on each board: its members count alike, whatever
groups they have been in elsewhere."""


class Arrivals:
    """The collectives of one group, as one member begins them."""

    def __init__(self, watch: Watch, name: str, members: Sequence[int], rank: int) -> None:
        """Count from the first; its members make a group in the same order as others alike.

        Args:
            watch: the board that says what the members do.
            name: the group's.
            members: their numbers on the board, by rank in the group.
            rank: this member's in the group.
        """
        alike, made = (name, tuple(members)), _made.setdefault(watch, Counter())
        made[alike] += 1
        group = zlib.crc32(repr((alike, made[alike])).encode()) % (1 << _GROUP_BITS)
        self._begun = group << _COUNT_BITS
        self._watch = watch
        self._peers = [member for r, member in enumerate(members) if r != rank]

    def begin(self) -> Arrival:
        """The next collective begins here, in the operation that was stamped last."""
        self._begun += 1
        self._watch.in_collective(self._begun)
        return Arrival(self._watch, self._begun, self._peers)


class Arrival:
    """One collective, for those that wait in it."""

    def __init__(self, watch: Watch, number: int, peers: Sequence[int]) -> None:
        self._watch = watch
        self._number = number
        self._peers = peers

    def only_those_behind(self, late: GroupTimeoutError) -> GroupTimeoutError:
        """The same error, without the members that have come to the collective."""
        self._watch.catch_up()
        behind = tuple(
            status
            for status in (self._watch.member_status(member) for member in self._peers)
            if not self._has_come(status.collective)
        )
        if not behind:
            return late
        return GroupTimeoutError(late.operation, late.timeout, behind, late.detail)

    def _has_come(self, collective: int) -> bool:
        same_group = collective >> _COUNT_BITS == self._number >> _COUNT_BITS
        return same_group and collective >= self._number
