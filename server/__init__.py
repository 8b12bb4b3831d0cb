"""The worker pool, its errors, and the most used names of the other packages.

This folder is installed as the package ``group_coordinator``. Each name is imported at its first
use, so ``import group_coordinator`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coordinator import GroupCoordinator as GroupCoordinator
    from coordinator import ParallelGroups as ParallelGroups
    from coordinator import init as init
    from shm_broadcast import CoordinatorError as CoordinatorError
    from shm_broadcast import DivergenceError as DivergenceError
    from shm_broadcast import GroupAbortedError as GroupAbortedError
    from shm_broadcast import GroupClosedError as GroupClosedError
    from shm_broadcast import GroupTimeoutError as GroupTimeoutError
    from shm_broadcast import MessageQueue as MessageQueue
    from shm_broadcast import PeerLostError as PeerLostError
    from shm_broadcast import SharedMemoryError as SharedMemoryError
    from shm_broadcast import __version__ as __version__

    from .config import PoolConfig as PoolConfig
    from .errors import CallDivergedError as CallDivergedError
    from .errors import CallRefusedError as CallRefusedError
    from .errors import CallStuckError as CallStuckError
    from .errors import CallTimeoutError as CallTimeoutError
    from .errors import DescriptorLimitError as DescriptorLimitError
    from .errors import HostError as HostError
    from .errors import PoolClosedError as PoolClosedError
    from .errors import ProcessLimitError as ProcessLimitError
    from .errors import RestartLimitError as RestartLimitError
    from .errors import StreamLostError as StreamLostError
    from .errors import WorkerError as WorkerError
    from .errors import WorkerLostError as WorkerLostError
    from .errors import WorkerStartError as WorkerStartError
    from .hosts.host_supervisor import serve_host as serve_host
    from .hosts.place import Hosts as Hosts
    from .launchers.ray_cluster import RayCluster as RayCluster
    from .pool import WorkerPool as WorkerPool
    from .replicas import Replicas as Replicas
    from .worker import WorkerContext as WorkerContext

_HOMES: Final = {
    ".config": "PoolConfig",
    ".errors": (
        "CallDivergedError CallRefusedError CallStuckError CallTimeoutError "
        "DescriptorLimitError HostError PoolClosedError ProcessLimitError RestartLimitError "
        "StreamLostError WorkerError WorkerLostError WorkerStartError"
    ),
    ".hosts.host_supervisor": "serve_host",
    ".hosts.place": "Hosts",
    ".launchers.ray_cluster": "RayCluster",
    ".pool": "WorkerPool",
    ".replicas": "Replicas",
    ".worker": "WorkerContext",
    "coordinator": "GroupCoordinator ParallelGroups init",
    "shm_broadcast": (
        "CoordinatorError DivergenceError GroupAbortedError GroupClosedError "
        "GroupTimeoutError MessageQueue PeerLostError SharedMemoryError __version__"
    ),
}
__all__ = sorted(name for names in _HOMES.values() for name in names.split())


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            try:
                module = importlib.import_module(home, __name__)
            except AttributeError as error:  # "from ... import" would hide it
                raise ImportError(f"{name} cannot be imported: {error}") from error
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
