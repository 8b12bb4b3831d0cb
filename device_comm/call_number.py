"""Store the number of the pool's call that a thread runs; log its operations.

If one rank omits an operation of a call, its next call would match the peers' operation of this
call, and ranks would use data of other requests. So the number travels with every operation through
shared memory and with every message. A rank that receives another number than its own raises
`DivergenceError` and discards the data.

The number is thread-local; other threads have 0. A call that hands operations to another thread
must do so on every rank. A group with members outside the pool takes part in no calls.

A rank logs its collectives: their count, a rolling checksum, and the last signatures
(`device_comm.shm.signature`). Count and checksum reveal a difference of verb, dtype, shape,
reduction, root or order over any transport; the signatures name it. `OperationCounts` has the log
of a call, `device_comm.divergence` one of all collectives of a group.

Messages are counted for each pair of ranks and direction.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from device_comm._native import call_number, next_digest, set_call_number
from shm_broadcast.layout import (
    COLLECTIVE_SIGNATURE,
    COLLECTIVE_STRIDE,
    DID_NAMES,
    LOG_COUNT,
    LOG_ENTRIES,
)

__all__ = ["call_number", "naming_call", "numbering", "set_call_number"]


def numbering(in_calls: bool) -> Callable[[], int]:
    """Return the function that numbers a group's operations: `call_number`, or a constant 0."""
    return call_number if in_calls else int


def naming_call(what: str, number: int) -> str:
    """Return ``what`` with the number of the call, if not 0, for error messages."""
    return f"{what} in call {number}" if number else what


VERBS: Final = DID_NAMES[1 : DID_NAMES.index("send")]
"""The collectives. A collective's index is its code in signatures."""

CALL_ENTRIES: Final = 8
"""The number of last collectives that a rank reports of a call."""

_U32: Final = 0xFFFFFFFF


def log_memory(entries: int) -> bytearray:
    """Return the memory of a log that keeps so many collectives."""
    return bytearray(LOG_ENTRIES + entries * COLLECTIVE_STRIDE)


class CollectiveLog:
    """The number, checksums and last signatures of one rank's collectives in one group.

    `shm_broadcast.layout` draws it. Any thread may read; one thread at a time may add.
    """

    def __init__(self, memory: bytearray) -> None:
        """Use a copy of another rank's log, or `log_memory`."""
        self.memory = memory
        self._words = memoryview(memory).cast("Q")
        self._entries = (len(memory) - LOG_ENTRIES) // COLLECTIVE_STRIDE

    @property
    def count(self) -> int:
        """Return the number of collectives."""
        return self._words[LOG_COUNT]

    def add(self, signature: bytes) -> int:
        """Add a collective; return the checksum of all."""
        words, before = self._words, self._words[LOG_COUNT]
        digest = next_digest(words[self._at(before) // 8] & _U32, signature)
        number, at = before + 1, self._at(before + 1)
        self.memory[at + COLLECTIVE_SIGNATURE : at + COLLECTIVE_STRIDE] = signature
        words[at // 8] = (number & _U32) << 32 | digest
        words[LOG_COUNT] = number
        return digest

    def digest(self, number: int) -> int | None:
        """Return the checksum of the first ``number`` collectives; None if it is not kept."""
        word = self._words[self._at(number) // 8]
        return word & _U32 if word >> 32 == number & _U32 else None

    def signature(self, number: int) -> bytes:
        """Return the signature of a collective, counted from 1; ``b""`` if it is not kept."""
        at = self._at(number)
        signature = bytes(self.memory[at + COLLECTIVE_SIGNATURE : at + COLLECTIVE_STRIDE])
        return signature if number and self.digest(number) is not None else b""

    def is_proven(self, number: int) -> bool:
        """Return whether the signature and the checksums of a collective belong together."""
        before, signature = self.digest(number - 1), self.signature(number)
        if before is None or not signature:
            return False
        return next_digest(before, signature) == self.digest(number)

    def take(self) -> bytes:
        """Return a copy and clear the log; ``b""`` if it is empty."""
        taken = bytes(self.memory) if self.count else b""
        if taken:
            self.memory[:] = bytes(len(taken))
        return taken

    def _at(self, number: int) -> int:
        return LOG_ENTRIES + number % self._entries * COLLECTIVE_STRIDE


class OperationCounts:
    """One rank's operations in one group since the last `take`.

    Only operations of a thread that is in a call count; one such thread at a time.
    """

    __slots__ = ("_messages", "_world_size", "log")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.log = CollectiveLog(log_memory(CALL_ENTRIES))
        self._messages = array("Q", [0]) * (2 * world_size)

    def add(self, signature: bytes) -> None:
        """Log a collective."""
        if call_number():
            self.log.add(signature)

    def count_sent(self, rank: int) -> None:
        """Count a message to ``rank``; ignore ranks outside the group."""
        if call_number() and 0 <= rank < self._world_size:
            self._messages[rank] += 1

    def count_received(self, rank: int) -> None:
        """Count a message from ``rank``; ignore ranks outside the group."""
        if call_number() and 0 <= rank < self._world_size:
            self._messages[self._world_size + rank] += 1

    def take(self) -> tuple[bytes, tuple[int, ...]]:
        """Return the log of collectives and the numbers of messages, and clear both.

        Ranks with the same collectives return the same log. The numbers are of the messages sent to
        each rank, then of those received from each; `()` if there are none.
        """
        messages = tuple(self._messages) if any(self._messages) else ()
        if messages:
            self._messages = array("Q", [0]) * len(messages)
        return self.log.take(), messages
