"""Ground floor: shared memory, waiting, liveness, and the message queue.

Everything above waits through this package, so deadlines, abort and liveness are decided here.
"""

from shm_broadcast.board import Board, BoardHandle
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    DRIVER_RANK,
    CoordinatorError,
    DivergenceError,
    Failure,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    MessageDecodeError,
    MessageError,
    MessageTooLargeError,
    PeerLostError,
    PeerProtocolError,
    SharedMemoryError,
    TransportError,
)
from shm_broadcast.liveness import ProcessId, ProcessWatch
from shm_broadcast.queue import MessageQueue
from shm_broadcast.queue_handle import DEFAULT_CAPACITY, QueueHandle
from shm_broadcast.segment import Segment, SegmentHandle

__all__ = [
    "Board",
    "BoardHandle",
    "CoordinatorError",
    "DEFAULT_CAPACITY",
    "DRIVER_RANK",
    "Deadline",
    "DivergenceError",
    "Failure",
    "GroupAbortedError",
    "GroupClosedError",
    "GroupTimeoutError",
    "MemberStatus",
    "MessageDecodeError",
    "MessageError",
    "MessageQueue",
    "MessageTooLargeError",
    "NEVER",
    "PeerLostError",
    "PeerProtocolError",
    "ProcessId",
    "ProcessWatch",
    "QueueHandle",
    "Segment",
    "SegmentHandle",
    "SharedMemoryError",
    "TransportError",
]
