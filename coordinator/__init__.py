"""Groups of ranks: rank arithmetic, collectives, messages, tensor dicts.

Names are imported at first use: an engine that only discovers the plug-in loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator as GroupCoordinator
    from coordinator.groups import ParallelGroups as ParallelGroups
    from coordinator.groups import StatelessGroupCoordinator as StatelessGroupCoordinator
    from coordinator.groups import current as current
    from coordinator.groups import init as init
    from coordinator.launcher import Launch as Launch
    from coordinator.norm_pass import all_reduce_norm_pass as all_reduce_norm_pass
    from coordinator.rank_grid import RankGrid as RankGrid
    from coordinator.stores import connect_store as connect_store
    from coordinator.stores import host_store as host_store
    from device_comm import ReduceOp as ReduceOp
    from device_comm import Work as Work
    from shm_broadcast import __version__ as __version__

_HOMES: Final = {
    "coordinator.norm_pass": "all_reduce_norm_pass",
    "coordinator.group": "GroupCoordinator",
    "coordinator.groups": "ParallelGroups current init StatelessGroupCoordinator",
    "coordinator.rank_grid": "RankGrid",
    "coordinator.stores": "connect_store host_store",
    "coordinator.launcher": "Launch",
    "device_comm": "ReduceOp Work",
    "shm_broadcast": "__version__",
}
__all__ = sorted(name for names in _HOMES.values() for name in names.split())


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
