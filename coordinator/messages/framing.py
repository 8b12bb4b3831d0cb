"""Messages of any length between ranks, as tensors of bytes over a communicator.

The receiver does not know the length. Every message begins with a frame of one size:

    0        7      8      12                             2048
    ┌────────┬──────┬──────┬───────────────────────────────┐ ┌─────────────────────┐
    │ length │ kind │ call │ the first 2036 bytes, padded  │ │ the rest, if any    │
    └────────┴──────┴──────┴───────────────────────────────┘ └─────────────────────┘
      little-endian

so a short message, with small tensors, takes one transfer. A receiver that asks for another kind
than the next message has, or in another call (`device_comm.call_number`), gets an error instead of
the message. A sender that cannot send its value sends a notice instead, so that no receiver waits.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from device_comm.call_number import naming_call
from shm_broadcast import DivergenceError, MessageDecodeError

FRAME: Final = 2048
_HEAD: Final = struct.Struct("<QI")
_LENGTH_BITS: Final = 56


class Kind(IntEnum):
    """What a message is: what both ends have called."""

    OBJECT = 1
    TENSOR_DICT = 2
    BROADCAST_OBJECT = 3
    BROADCAST_TENSOR_DICT = 4
    GATHERED_OBJECT = 5
    REFUSED = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Message:
    """Bytes to send, or room for bytes to receive, framed.

    Attributes:
        kind: what it is; of one that is received, as `check` has found it.
        first: the frame, (2048,) uint8.
    """

    __slots__ = ("_call", "_data", "_length", "first", "kind")

    def __init__(self, kind: Kind, payload: bytes | None = None, call: int = 0) -> None:
        """Frame ``payload``; None makes room for a message of that kind that is to come.

        Args:
            kind: what it is.
            payload: what it holds.
            call: the number of the call that it is part of; 0: none.
        """
        self.kind: int = kind
        self._call = call
        self._length = 0 if payload is None else len(payload)
        self._data = bytearray(max(FRAME, _HEAD.size + self._length))
        if payload is not None:
            _HEAD.pack_into(self._data, 0, kind << _LENGTH_BITS | self._length, self._call)
            self._data[_HEAD.size : _HEAD.size + self._length] = payload
        self.first = torch.frombuffer(self._data, dtype=torch.uint8)[:FRAME]

    @property
    def has_come(self) -> bool:
        """Of one that is received: whether its frame is there."""
        return any(self._data[: _HEAD.size])  # the kind, at least, is not 0

    def check(self, src: int) -> None:
        """Read the frame that has come from ``src``: of this kind, or a refusal, in this call.

        Raises:
            DivergenceError: it is another.
        """
        word, call = _HEAD.unpack_from(self._data)
        found, self._length = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1
        if found not in (self.kind, Kind.REFUSED) or call != self._call:
            names = {int(kind): str(kind) for kind in Kind}
            name = names.get(found, f"message of kind {found}")
            raise DivergenceError(
                src,
                naming_call(f"receive of {Kind(self.kind)}", self._call),
                naming_call(f"send of {name}", call),
            )
        self.kind = found

    def rest(self) -> Tensor | None:
        """What does not fit into the frame, (n,) uint8.

        Raises:
            MessageDecodeError: it is larger than this host's memory.
        """
        total = _HEAD.size + self._length
        if total <= FRAME:
            return None
        if len(self._data) < total:
            # The frame's tensor keeps the old bytes, which cannot grow under it.
            try:
                self._data = self._data + bytearray(total - FRAME)
            except MemoryError as error:
                raise MessageDecodeError(f"a message that says it has {total} bytes") from error
        return torch.frombuffer(self._data, dtype=torch.uint8)[FRAME:total]

    def frames(self) -> list[Tensor]:
        """What is sent, one after the other."""
        rest = self.rest()
        return [self.first] if rest is None else [self.first, rest]

    @property
    def payload(self) -> memoryview:
        """The bytes, once everything is there."""
        return memoryview(self._data)[_HEAD.size : _HEAD.size + self._length]
