"""Collects sends and receives, to issue them to NCCL together.

In NCCL a send ends only when it is received, and a communicator's operations run in the order in
which they are issued: two ranks that both send first would deadlock. Issued together, as a group,
sends and receives progress side by side. So messages that the caller does not wait for are held
back until one of them is waited for, any other operation is issued, or `HOLD_SECONDS` have passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from device_comm.cuda.nccl.carried_types import BYTE

if TYPE_CHECKING:
    from device_comm.cuda.device.streams import Stream, StreamMark
    from device_comm.cuda.nccl.library import NcclLibrary
    from device_comm.operation import Operation
    from shm_broadcast.errors import CoordinatorError

HOLD_SECONDS: Final = 0.002


@dataclass(eq=False, slots=True)
class MessageBatch:
    """Messages that are issued together.

    Attributes:
        stream: the stream to issue them on.
        messages: sends and receives, none of them empty, in the order of the calls.
        mark: the point in the stream after them; None before they are issued.
        error: why they could not be issued; None if they could, or were not issued yet.
    """

    stream: Stream
    messages: list[Operation] = field(default_factory=list)
    mark: StreamMark | None = None
    error: CoordinatorError | None = None

    def enqueue(self, nccl: NcclLibrary, comm: int, stream: int) -> None:
        """Issue them to NCCL as a group."""
        try:
            nccl.group_start()
            for each in self.messages:
                sends = each.verb == "send"
                move, cargo = (nccl.send, each.source) if sends else (nccl.recv, each.output)
                move(cargo.data_ptr(), cargo.nbytes, BYTE, each.peer, comm, stream)
        finally:
            nccl.group_end()
