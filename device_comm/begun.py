"""Counts the operations that a rank begins in a pool's call, so that the driver can compare ranks.

In a correct call all ranks of a group begin the same collectives, and every message is both sent
and received. The counts show a difference even where the transport carries no call numbers
(`device_comm.call_number`).
"""

from __future__ import annotations

from array import array
from typing import Final

from device_comm.call_number import call_number
from shm_broadcast.layout import DID_NAMES

VERBS: Final = DID_NAMES[1 : DID_NAMES.index("send")]
"""The collectives. The place in this tuple is a collective's code in all that ranks compare."""

_CODES: Final = {verb: code for code, verb in enumerate(VERBS)}
_ITEM: Final = "I"


class Begun:
    """Counts one rank's operations in one group since the last `take`.

    Only operations of a thread that is in a call are counted; one such thread at a time.

    Attributes:
        words: u32 counters: one per verb, in the order of `VERBS`, then the messages sent to each
            rank, then those received from each rank. The C extension writes them, too.
    """

    __slots__ = ("_nothing", "_world_size", "words")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.words = array(_ITEM, [0]) * (len(VERBS) + 2 * world_size)
        self._nothing = self.words.tobytes()

    def count(self, verb: str) -> None:
        """Count a collective; other verbs are ignored."""
        if call_number() and verb in _CODES:
            self.words[_CODES[verb]] += 1

    def count_sent(self, rank: int) -> None:
        """Count a message to ``rank``, if that is a rank of the group."""
        if call_number() and 0 <= rank < self._world_size:
            self.words[len(VERBS) + rank] += 1

    def count_received(self, rank: int) -> None:
        """Count the receipt of a message from ``rank``, if that is a rank of the group."""
        if call_number() and 0 <= rank < self._world_size:
            self.words[len(VERBS) + self._world_size + rank] += 1

    def take(self) -> bytes:
        """Return the counters and reset them; ``b""`` if nothing was counted."""
        counted = self.words.tobytes()
        if counted == self._nothing:
            return b""
        self.words[:] = array(_ITEM, self._nothing)
        return counted


def counts_of(counted: bytes, world_size: int) -> tuple[list[int], list[int], list[int]]:
    """Decode what `Begun.take` returned: counts of collectives, messages sent, and received."""
    words = array(_ITEM, counted or bytes(4 * (len(VERBS) + 2 * world_size))).tolist()
    sent = len(VERBS)
    return words[:sent], words[sent : sent + world_size], words[sent + world_size :]
