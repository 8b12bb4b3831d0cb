"""Messages on their way into NCCL.

In NCCL a send is done, in stream order, when it is received, and the work of one communicator is
done in the order in which it was issued: two ranks that send to each other first would wait for
ever. Issued together, as a group, sends and receives help each other along. So those that the
caller does not wait for are held back a moment, until one of them is waited for, or anything else
is issued, or `HOLD_SECONDS` have passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from device_comm.cuda.nccl_wire import BYTE

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.base import Call
    from device_comm.cuda.nccl_library import NcclLibrary
    from device_comm.cuda.streams import Mark, Stream
    from shm_broadcast.errors import CoordinatorError

HOLD_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive of ``cargo``, contiguous and not empty; bytes travel."""

    sends: bool
    cargo: Tensor
    peer: int
    call: Call

    def enqueue(self, nccl: NcclLibrary, comm: int, stream: int) -> bool:
        """Give it to NCCL."""
        move = nccl.send if self.sends else nccl.recv
        return move(self.cargo.data_ptr(), self.cargo.nbytes, BYTE, self.peer, comm, stream)


@dataclass(eq=False, slots=True)
class Batch:
    """Messages that are issued together.

    Attributes:
        stream: where.
        messages: in the order in which they were asked for.
        mark: behind them, once they have been issued.
        error: why they were not.
    """

    stream: Stream
    messages: list[Message] = field(default_factory=list)
    mark: Mark | None = None
    error: CoordinatorError | None = None

    def enqueue(self, nccl: NcclLibrary, comm: int, stream: int) -> bool:
        """Give them to NCCL, as a group."""
        nccl.group_start()
        try:
            for message in self.messages:
                message.enqueue(nccl, comm, stream)
        finally:
            busy = nccl.group_end()
        return busy
