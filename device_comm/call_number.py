"""Store the number of the pool's call that a thread runs; fingerprint its operations.

If one rank omits an operation of a call, its next call would match the peers' operation of this
call, and ranks would use data of other requests. So the number travels with every operation through
shared memory and with every message. A rank that receives another number than its own raises
`DivergenceError` and discards the data.

The number is thread-local; other threads have 0. A call that hands operations to another thread
must do so on every rank. A group with members outside the pool takes part in no calls.

A rank counts its collectives in a call, and keeps a rolling checksum of their signatures
(`device_comm.shm.signature`) and the last few signatures. Count and checksum reveal a difference of
verb, dtype, shape, reduction, root or order over any transport; the signatures name it.

    checksum 0 = 0     checksum n = mix(checksum n - 1, hash of the n-th signature)

`mix` is a bijection of the checksum, so ranks that differ once differ from there on. Messages are
counted for each pair of ranks and direction.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from device_comm._native import call_number, set_call_number
from shm_broadcast.layout import DID_NAMES

__all__ = ["call_number", "naming_call", "numbering", "set_call_number"]


def numbering(in_calls: bool) -> Callable[[], int]:
    """Return the function that numbers a group's operations: `call_number`, or a constant 0."""
    return call_number if in_calls else int


def naming_call(what: str, number: int) -> str:
    """Return ``what`` with the number of the call, if not 0, for error messages."""
    return f"{what} in call {number}" if number else what


VERBS: Final = DID_NAMES[1 : DID_NAMES.index("send")]
"""The collectives. A collective's index is its code in signatures."""

BEGUN_KEPT: Final = 8
"""The number of last collectives that a rank reports."""

BEGUN_COUNT: Final = 0
BEGUN_CHECKSUM: Final = 1
BEGUN_LAST: Final = 2
SIGNATURE_WORDS: Final = 7
BEGUN_FACTOR: Final = 0x9E3779B97F4A7C15
BEGUN_SENT: Final = BEGUN_LAST + BEGUN_KEPT * SIGNATURE_WORDS
_ITEM: Final = "Q"
_SIZE: Final = 8
_SIGNATURE_BYTES: Final = SIGNATURE_WORDS * _SIZE
_HEAD: Final = struct.Struct("=QQ")

_U64: Final = (1 << 64) - 1


class Did(NamedTuple):
    """One rank's operations in one group, decoded from `OperationCounts.take`.

    Attributes:
        collectives: their count.
        last: the last signatures by number; the first collective of a call is 1.
        sent, received: messages per rank.
    """

    collectives: int
    checksum: int
    last: dict[int, bytes]
    sent: list[int]
    received: list[int]


class OperationCounts:
    """The fingerprint of one rank's operations in one group since the last `take`.

    Only operations of a thread that is in a call count; one such thread at a time.

    Attributes:
        words: u64: the count of collectives, their checksum, the last signatures, the messages sent
            to each rank, the messages received from each rank. The C extension writes them as well.
    """

    __slots__ = ("_nothing", "_world_size", "words")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.words = array(_ITEM, [0]) * (BEGUN_SENT + 2 * world_size)
        self._nothing = self.words.tobytes()

    def add(self, signature: bytes) -> None:
        """Count a collective and add its signature to the checksum."""
        if call_number():
            words = self.words
            count = words[BEGUN_COUNT]
            at = BEGUN_LAST + count % BEGUN_KEPT * SIGNATURE_WORDS
            words[at : at + SIGNATURE_WORDS] = array(_ITEM, signature)
            words[BEGUN_CHECKSUM] = _mixed(words[BEGUN_CHECKSUM], _hashed(signature))
            words[BEGUN_COUNT] = count + 1

    def count_sent(self, rank: int) -> None:
        """Count a message to ``rank``; ignore ranks outside the group."""
        if call_number() and 0 <= rank < self._world_size:
            self.words[BEGUN_SENT + rank] += 1

    def count_received(self, rank: int) -> None:
        """Count a message from ``rank``; ignore ranks outside the group."""
        if call_number() and 0 <= rank < self._world_size:
            self.words[BEGUN_SENT + self._world_size + rank] += 1

    def take(self) -> bytes:
        """Return the fingerprint and start a new one; ``b""`` if nothing was counted.

        Ranks with the same collectives return the same bytes, except for the messages at the end.
        """
        words = self.words
        taken = words.tobytes()
        if taken == self._nothing:
            return b""
        count, head = words[BEGUN_COUNT], BEGUN_LAST * _SIZE
        words[:] = array(_ITEM, self._nothing)
        signatures, messages = taken[head : BEGUN_SENT * _SIZE], taken[BEGUN_SENT * _SIZE :]
        if count <= BEGUN_KEPT:
            signatures = signatures[: count * _SIGNATURE_BYTES]
        else:  # oldest first
            oldest = count % BEGUN_KEPT * _SIGNATURE_BYTES
            signatures = signatures[oldest:] + signatures[:oldest]
        if messages == self._nothing[BEGUN_SENT * _SIZE :]:
            messages = b""
        return taken[:head] + signatures + messages


def has_messages(begun: bytes) -> bool:
    """Return True if ``begun``, from `OperationCounts.take`, counts messages."""
    return bool(begun) and len(begun) > _size_of_head(begun)


def did_of(begun: bytes, world_size: int) -> Did:
    """Decode the bytes that `OperationCounts.take` returned."""
    if not begun:
        return Did(0, 0, {}, [0] * world_size, [0] * world_size)
    count, checksum = _HEAD.unpack_from(begun)
    head, size = _size_of_head(begun), _SIGNATURE_BYTES
    signatures = [begun[at : at + size] for at in range(_HEAD.size, head, size)]
    first = count - len(signatures) + 1
    counts = array(_ITEM, begun[head:] or bytes(2 * world_size * _SIZE)).tolist()
    last = {first + index: signature for index, signature in enumerate(signatures)}
    return Did(count, checksum, last, counts[:world_size], counts[world_size:])


def _size_of_head(begun: bytes) -> int:
    count, _ = _HEAD.unpack_from(begun)
    return _HEAD.size + int(min(count, BEGUN_KEPT)) * _SIGNATURE_BYTES


@lru_cache(maxsize=1024)
def _hashed(signature: bytes) -> int:
    hashed = 0
    for word in array(_ITEM, signature):
        hashed = _mixed(hashed, word)
    return hashed


def _mixed(checksum: int, word: int) -> int:
    product = (checksum ^ word) * BEGUN_FACTOR & _U64
    return product ^ product >> 32
