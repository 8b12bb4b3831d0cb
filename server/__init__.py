"""The worker pool, its errors, and the most used names of the other packages.

This folder is installed as the package ``group_coordinator``. Each name is imported at its first
use, so ``import group_coordinator`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coordinator import GroupCoordinator, ParallelGroups, init
    from shm_broadcast import (
        CoordinatorError,
        DivergenceError,
        GroupAbortedError,
        GroupClosedError,
        GroupTimeoutError,
        MessageQueue,
        PeerLostError,
        SharedMemoryError,
        __version__,
    )

    from .config import PoolConfig
    from .errors import (
        CallDivergedError,
        CallRefusedError,
        CallStuckError,
        CallTimeoutError,
        DescriptorLimitError,
        HostError,
        PoolClosedError,
        ProcessLimitError,
        RestartLimitError,
        StreamLostError,
        WorkerError,
        WorkerLostError,
        WorkerStartError,
    )
    from .hosts.host_supervisor import serve_host
    from .hosts.place import Hosts
    from .launchers.ray_actors import RayCluster
    from .pool import WorkerPool
    from .replicas import Replicas
    from .worker import WorkerContext

__all__ = [
    "CallDivergedError",
    "CallRefusedError",
    "CallStuckError",
    "CallTimeoutError",
    "CoordinatorError",
    "DescriptorLimitError",
    "DivergenceError",
    "GroupAbortedError",
    "GroupClosedError",
    "GroupCoordinator",
    "GroupTimeoutError",
    "HostError",
    "Hosts",
    "MessageQueue",
    "ParallelGroups",
    "PeerLostError",
    "PoolClosedError",
    "PoolConfig",
    "ProcessLimitError",
    "RayCluster",
    "Replicas",
    "RestartLimitError",
    "SharedMemoryError",
    "StreamLostError",
    "WorkerContext",
    "WorkerError",
    "WorkerLostError",
    "WorkerPool",
    "WorkerStartError",
    "__version__",
    "init",
    "serve_host",
]

_HOMES: Final = {
    ".config": ("PoolConfig",),
    ".errors": (
        *("CallDivergedError", "CallRefusedError", "CallStuckError", "CallTimeoutError"),
        *("DescriptorLimitError", "HostError", "PoolClosedError", "ProcessLimitError"),
        *("RestartLimitError", "StreamLostError"),
        *("WorkerError", "WorkerLostError", "WorkerStartError"),
    ),
    ".hosts.host_supervisor": ("serve_host",),
    ".hosts.place": ("Hosts",),
    ".launchers.ray_actors": ("RayCluster",),
    ".pool": ("WorkerPool",),
    ".replicas": ("Replicas",),
    ".worker": ("WorkerContext",),
    "coordinator": ("GroupCoordinator", "ParallelGroups", "init"),
    "shm_broadcast": (
        *("CoordinatorError", "DivergenceError", "GroupAbortedError", "GroupClosedError"),
        *("GroupTimeoutError", "MessageQueue", "PeerLostError", "SharedMemoryError"),
        "__version__",
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            try:
                module = importlib.import_module(home, __name__)
            except AttributeError as error:  # "from ... import" would hide it
                raise ImportError(f"{name} cannot be imported: {error}") from error
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
