"""Which members have come to a collective, where the transport itself does not tell.

Each member says on its board which collective of its group it has begun (`Arrivals.begin`). So
whoever waits can tell who is behind, and who has begun another operation in its place.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from shm_broadcast.errors import DivergenceError, GroupTimeoutError
from shm_broadcast.layout import OPERATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.watch import Watch

_LOOK_SECONDS: Final = 0.1
"""How often a collective that takes long looks for members that have begun another one."""

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
        self._peers = [(r, member) for r, member in enumerate(members) if r != rank]

    def begin(self, operation: str) -> Arrival:
        """The next collective begins here, in the stamped ``operation``."""
        self._begun += 1
        self._watch.in_collective(self._begun)
        return Arrival(self._watch, operation, self._begun, self._peers)


class Arrival:
    """One collective, for those that wait in it."""

    def __init__(
        self, watch: Watch, operation: str, number: int, peers: Sequence[tuple[int, int]]
    ) -> None:
        self._watch = watch
        self._operation = operation
        self._number = number
        self._peers = peers
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._suspects: set[int] = set()

    def check(self) -> None:
        """Now and then: compare what the members have begun.

        Raises:
            DivergenceError: one has begun another operation in this one's place.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        suspects = set()
        for rank, member in self._peers:
            status = self._watch.member_status(member)
            if status.collective == self._number and self._differs(status.operation):
                if rank in self._suspects:  # what is being written may be read half
                    where = f" on {status.host}" if status.host else ""
                    raise DivergenceError(rank, self._operation, f"{status.operation}{where}")
                suspects.add(rank)
        self._suspects = suspects

    def only_those_behind(self, late: GroupTimeoutError) -> GroupTimeoutError:
        """The same error, without the members that have come to the collective."""
        self._watch.catch_up()
        behind = tuple(
            status
            for status in (self._watch.member_status(member) for _, member in self._peers)
            if not self._has_come(status.collective)
        )
        if not behind:
            return late
        return GroupTimeoutError(late.operation, late.timeout, behind, late.detail)

    def _differs(self, operation: str) -> bool:
        ours = self._operation.encode()[:OPERATION_BYTES].decode(errors="replace")
        group = ours.rpartition(" ")[0]
        return operation.startswith(group) and operation != ours

    def _has_come(self, collective: int) -> bool:
        same_group = collective >> _COUNT_BITS == self._number >> _COUNT_BITS
        return same_group and collective >= self._number
