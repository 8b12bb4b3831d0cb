"""Messages of any length between ranks, as tensors of bytes over a communicator.

The receiver does not know the length. Every message begins with a frame of one size:

    0        8                                     1024
    ┌────────┬──────────────────────────────────────┐ ┌─────────────────────┐
    │ length │ the first 1016 bytes, padded          │ │ the rest, if any    │
    └────────┴──────────────────────────────────────┘ └─────────────────────┘
      little-endian

so what is short, as nearly all headers are, takes one message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from device_comm import DeviceCommunicator
    from shm_broadcast import Deadline

FRAME = 1024
_LENGTH = 8


class Message:
    """Bytes to send, or room for bytes to receive, framed.

    Attributes:
        first: the frame, (1024,) uint8.
    """

    __slots__ = ("_data", "first")

    def __init__(self, payload: bytes | None = None) -> None:
        """Frame ``payload``; None makes room for a message that is to come."""
        length = 0 if payload is None else len(payload)
        self._data = bytearray(max(FRAME, _LENGTH + length))
        if payload is not None:
            self._data[:_LENGTH] = length.to_bytes(_LENGTH, "little")
            self._data[_LENGTH : _LENGTH + length] = payload
        self.first = torch.frombuffer(self._data, dtype=torch.uint8)[:FRAME]

    def rest(self) -> Tensor | None:
        """What does not fit into the frame, (n,) uint8; needs the frame to be there."""
        total = _LENGTH + self._length()
        if total <= FRAME:
            return None
        if len(self._data) < total:
            # The frame's tensor keeps the old bytes, which cannot grow under it.
            self._data = self._data + bytearray(total - FRAME)
        return torch.frombuffer(self._data, dtype=torch.uint8)[FRAME:total]

    def frames(self) -> list[Tensor]:
        """What is sent, one after the other."""
        rest = self.rest()
        return [self.first] if rest is None else [self.first, rest]

    @property
    def payload(self) -> memoryview:
        """The bytes, once everything is there."""
        return memoryview(self._data)[_LENGTH : _LENGTH + self._length()]

    def _length(self) -> int:
        return int.from_bytes(self._data[:_LENGTH], "little")


def broadcast_bytes(
    comm: DeviceCommunicator, payload: bytes | None, src: int, deadline: Deadline
) -> memoryview:
    """The payload of rank ``src``; the others pass None. Collective: yes, every member."""
    message = Message(payload)
    comm.broadcast_(message.first, src=src, timeout=deadline)
    rest = message.rest()
    if rest is not None:
        comm.broadcast_(rest, src=src, timeout=deadline)
    return message.payload
