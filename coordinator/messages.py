"""Messages of any length between ranks, as tensors of bytes over a communicator.

The receiver does not know the length. Every message begins with a frame of one size:

    0        7      8                                     1024
    ┌────────┬──────┬──────────────────────────────────────┐ ┌─────────────────────┐
    │ length │ kind │ the first 1016 bytes, padded          │ │ the rest, if any    │
    └────────┴──────┴──────────────────────────────────────┘ └─────────────────────┘
      little-endian

so what is short, as nearly all headers are, takes one message. Who asks for another kind than
what was sent next is told so, and is not given one for the other.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shm_broadcast import DivergenceError

if TYPE_CHECKING:
    from device_comm import DeviceCommunicator
    from shm_broadcast import Deadline

FRAME = 1024
_KIND = 7
_HEAD = 8


class Kind(IntEnum):
    """What a message is: what both ends have called."""

    OBJECT = 1
    TENSOR_DICT = 2
    BROADCAST_OBJECT = 3
    BROADCAST_TENSOR_DICT = 4
    GATHERED_OBJECT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Message:
    """Bytes to send, or room for bytes to receive, framed.

    Attributes:
        kind: what it is.
        first: the frame, (1024,) uint8.
    """

    __slots__ = ("_data", "first", "kind")

    def __init__(self, kind: Kind, payload: bytes | None = None) -> None:
        """Frame ``payload``; None makes room for a message of that kind that is to come."""
        length = 0 if payload is None else len(payload)
        self.kind = kind
        self._data = bytearray(max(FRAME, _HEAD + length))
        if payload is not None:
            self._data[:_KIND] = length.to_bytes(_KIND, "little")
            self._data[_KIND] = kind
            self._data[_HEAD : _HEAD + length] = payload
        self.first = torch.frombuffer(self._data, dtype=torch.uint8)[:FRAME]

    def check(self, src: int) -> None:
        """Require that what has come from rank ``src`` is of this kind.

        Raises:
            DivergenceError: it is not.
        """
        found = self._data[_KIND]
        if found != self.kind:
            names = {int(kind): str(kind) for kind in Kind}
            name = names.get(found, f"message of kind {found}")
            raise DivergenceError(src, f"receive of {self.kind}", f"send of {name}")

    def rest(self) -> Tensor | None:
        """What does not fit into the frame, (n,) uint8; needs the frame to be there."""
        total = _HEAD + self._length()
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
        return memoryview(self._data)[_HEAD : _HEAD + self._length()]

    def _length(self) -> int:
        return int.from_bytes(self._data[:_KIND], "little")


def broadcast_bytes(
    comm: DeviceCommunicator, kind: Kind, payload: bytes | None, src: int, deadline: Deadline
) -> memoryview:
    """The payload of rank ``src``; the others pass None. Collective: yes, every member.

    Raises:
        DivergenceError: that of ``src`` is of another kind; the group is aborted.
    """
    message = Message(kind, payload)
    comm.broadcast_(message.first, src=src, timeout=deadline)
    try:
        message.check(src)
    except DivergenceError as error:
        comm.abort(error)
        raise
    rest = message.rest()
    if rest is not None:
        comm.broadcast_(rest, src=src, timeout=deadline)
    return message.payload
