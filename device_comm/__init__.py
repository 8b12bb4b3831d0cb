"""Move tensors between the ranks of a group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from shm_broadcast.extension import require_extension

if TYPE_CHECKING:
    from device_comm.backend import Backend, Capabilities, Identity, LoopbackBackend
    from device_comm.communicator import Communicator
    from device_comm.operation import (
        ALL_VERBS,
        Operation,
        ReduceOp,
        check_reduction,
        reduce_in_rank_order,
    )
    from device_comm.shm.shm_backend import ShmBackend
    from device_comm.torch_backend import TorchBackend
    from device_comm.watch import LoneWatch, Watch
    from device_comm.work import AllPending, Pending, Work, all_pending
    from device_comm.wrappers import Wrapper
    from shm_broadcast import __version__

__all__ = [
    "ALL_VERBS",
    "AllPending",
    "Backend",
    "Capabilities",
    "Communicator",
    "Identity",
    "LoneWatch",
    "LoopbackBackend",
    "Operation",
    "Pending",
    "ReduceOp",
    "ShmBackend",
    "TorchBackend",
    "Watch",
    "Work",
    "Wrapper",
    "__version__",
    "all_pending",
    "check_reduction",
    "reduce_in_rank_order",
]

require_extension("device_comm")

_HOMES: Final = {
    "device_comm.backend": (
        "Backend",
        "Capabilities",
        "Identity",
        "LoopbackBackend",
    ),
    "device_comm.communicator": ("Communicator",),
    "device_comm.operation": (
        "ALL_VERBS",
        "Operation",
        "ReduceOp",
        "check_reduction",
        "reduce_in_rank_order",
    ),
    "device_comm.shm.shm_backend": ("ShmBackend",),
    "device_comm.torch_backend": ("TorchBackend",),
    "device_comm.watch": (
        "LoneWatch",
        "Watch",
    ),
    "device_comm.work": (
        "AllPending",
        "Pending",
        "Work",
        "all_pending",
    ),
    "device_comm.wrappers": ("Wrapper",),
    "shm_broadcast": ("__version__",),
}


def __getattr__(name: str) -> Any:
    # At first use: a pool's driver compares ranks without loading torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
