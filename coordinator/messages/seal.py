"""Seals: proof of a message's sender, receiver and number, and that it is unchanged.

    ┌────────┬──────────────┬─────────┐
    │ number │ HMAC-SHA256  │ payload │      8 bytes, little-endian; 32 bytes
    └────────┴──────────────┴─────────┘

The HMAC is over kind, sender, receiver, number and payload. Its key belongs to one group, and is
made of something that only the members know (the launcher's secret, or random bytes in the memory
of their host) and of random bytes of each member, so a later group does not accept messages sealed
for an earlier one. Messages from one member to another are numbered; one that is not the next is
refused, so none is repeated, left out, or put before another.

Assumes: the members trust each other. A seal hides nothing: anybody who listens can read the
payload.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import Counter
from typing import TYPE_CHECKING, Final

from shm_broadcast import MessageSealError
from shm_broadcast.remote.derived_key import derive_key

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERYONE: Final = 0xFFFFFFFF
"""The receiver of what goes to all members at once."""

NONCE_BYTES: Final = 16
"""Random bytes that each member adds to the key."""

_TAG_BYTES: Final = 32
_NUMBER = struct.Struct("<Q")
_ABOUT = struct.Struct("<BIIQ")
_HEAD: Final = _NUMBER.size + _TAG_BYTES
_CONTEXT: Final = b"group-coordinator messages 1: "


class Seal:
    """One member's seals on what it sends, and its checks of what it receives."""

    def __init__(self, secret: bytes, group: str, nonces: Sequence[bytes], rank: int) -> None:
        """Begin with the first message.

        Args:
            secret: what the members know and nobody else: 16 bytes or more.
            group: the group's name.
            nonces: random bytes of each member, by rank, this one's among them.
            rank: this member's.
        """
        self._key = derive_key(secret, b"".join(nonces), _CONTEXT + group.encode())
        self._rank = rank
        self._sent: Counter[int] = Counter()
        self._due: Counter[tuple[int, int]] = Counter()

    def close(self, kind: int, payload: bytes, dst: int) -> bytes:
        """``payload``, sealed as the next message to ``dst``."""
        number = self._sent[dst]
        self._sent[dst] += 1
        tag = self._tag(kind, self._rank, dst, number, payload)
        return _NUMBER.pack(number) + tag + payload

    def open(self, kind: int, sealed: memoryview, src: int, dst: int) -> memoryview:
        """The payload of a message of ``src``; call it in the order of the messages, once for each.

        Raises:
            MessageSealError: it is not the next message of ``src`` to ``dst``.
        """
        due = self._due[src, dst]
        self._due[src, dst] += 1
        if len(sealed) < _HEAD:
            raise MessageSealError(src, "it has no seal: was this rank alone given a secret?")
        (number,) = _NUMBER.unpack_from(sealed)
        tag, payload = bytes(sealed[_NUMBER.size : _HEAD]), sealed[_HEAD:]
        if not hmac.compare_digest(tag, self._tag(kind, src, dst, number, payload)):
            raise MessageSealError(src, "its seal does not fit: it was changed, or not sent by it")
        if number != due:
            raise MessageSealError(src, f"it is message {number} where message {due} is due")
        return payload

    def _tag(
        self, kind: int, src: int, dst: int, number: int, payload: bytes | memoryview
    ) -> bytes:
        digest = hmac.new(self._key, _ABOUT.pack(kind, src, dst, number), hashlib.sha256)
        digest.update(payload)
        return digest.digest()
