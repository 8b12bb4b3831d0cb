"""The lowest package: shared memory, waiting, liveness, and the message queue.

All packages above wait through it: deadline, abort and lost peers are handled here. The queue loads
torch, so it is imported at its first use; a board needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import shm_broadcast.extension  # noqa: F401 - first: raises if the C extension was not built
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    DRIVER_RANK,
    CoordinatorError,
    DivergenceError,
    Failure,
    ForeignMemoryError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    MessageDecodeError,
    MessageError,
    MessageRefusedError,
    MessageSealError,
    PeerLostError,
    PeerProtocolError,
    SharedMemoryError,
    TransportError,
)
from shm_broadcast.process import ProcessId, ProcessWatch
from shm_broadcast.segment import Segment, SegmentHandle
from shm_broadcast.state.board import Board, BoardHandle

if TYPE_CHECKING:
    from shm_broadcast.queue.handle import DEFAULT_CAPACITY, QueueHandle
    from shm_broadcast.queue.message_queue import MessageQueue

__all__ = [
    "Board",
    "BoardHandle",
    "CoordinatorError",
    "DEFAULT_CAPACITY",
    "DRIVER_RANK",
    "Deadline",
    "DivergenceError",
    "Failure",
    "ForeignMemoryError",
    "GroupAbortedError",
    "GroupClosedError",
    "GroupTimeoutError",
    "MemberStatus",
    "MessageDecodeError",
    "MessageError",
    "MessageQueue",
    "MessageRefusedError",
    "MessageSealError",
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
    "__version__",
]

__version__: Final = "0.2.0"
"""The version of all four packages; `pyproject.toml` reads it here."""

_HOMES: Final = {
    "DEFAULT_CAPACITY": "shm_broadcast.queue.handle",
    "MessageQueue": "shm_broadcast.queue.message_queue",
    "QueueHandle": "shm_broadcast.queue.handle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
