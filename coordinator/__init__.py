"""Groups of ranks: rank arithmetic, collectives, messages, tensor dicts.

Names are imported at first use: an engine that only discovers the plug-in loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator
    from coordinator.groups import ParallelGroups, StatelessGroupCoordinator, current, init
    from coordinator.launcher import Launch
    from coordinator.norm_pass import all_reduce_norm_pass
    from coordinator.rank_grid import RankGrid
    from coordinator.rendezvous import connect_store, host_store
    from device_comm import ReduceOp, Work
    from shm_broadcast import __version__

__all__ = [
    "GroupCoordinator",
    "Launch",
    "ParallelGroups",
    "RankGrid",
    "ReduceOp",
    "StatelessGroupCoordinator",
    "Work",
    "__version__",
    "all_reduce_norm_pass",
    "connect_store",
    "current",
    "host_store",
    "init",
]

_HOMES: Final = {
    "coordinator.norm_pass": ("all_reduce_norm_pass",),
    "coordinator.group": ("GroupCoordinator",),
    "coordinator.groups": (
        "ParallelGroups",
        "current",
        "init",
        "StatelessGroupCoordinator",
    ),
    "coordinator.rank_grid": ("RankGrid",),
    "coordinator.rendezvous": (
        "connect_store",
        "host_store",
    ),
    "coordinator.launcher": ("Launch",),
    "device_comm": (
        "ReduceOp",
        "Work",
    ),
    "shm_broadcast": ("__version__",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
