"""The worker pool and its service.

Names are imported when they are used: the command line answers before torch is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.config import PoolConfig
    from server.errors import (
        CallRefusedError,
        CallTimeoutError,
        PoolClosedError,
        WorkerError,
        WorkerLostError,
        WorkerStartError,
    )
    from server.pool import WorkerPool
    from server.worker import WorkerContext

__all__ = [
    "CallRefusedError",
    "CallTimeoutError",
    "PoolClosedError",
    "PoolConfig",
    "WorkerContext",
    "WorkerError",
    "WorkerLostError",
    "WorkerPool",
    "WorkerStartError",
]

_HOMES = {"PoolConfig": "config", "WorkerContext": "worker", "WorkerPool": "pool"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'server' has no attribute {name!r}")
    home = importlib.import_module(f"server.{_HOMES.get(name, 'errors')}")
    return getattr(home, name)
