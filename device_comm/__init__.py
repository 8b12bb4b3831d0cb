"""Move tensors between the ranks of a group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from shm_broadcast.extension import require_extension

if TYPE_CHECKING:
    from device_comm.backend import Backend as Backend
    from device_comm.backend import Capabilities as Capabilities
    from device_comm.backend import Identity as Identity
    from device_comm.backend import LoopbackBackend as LoopbackBackend
    from device_comm.communicator import Communicator as Communicator
    from device_comm.operation import ALL_VERBS as ALL_VERBS
    from device_comm.operation import Operation as Operation
    from device_comm.operation import ReduceOp as ReduceOp
    from device_comm.operation import check_reduction as check_reduction
    from device_comm.operation import reduce_in_rank_order as reduce_in_rank_order
    from device_comm.shm.shm_backend import ShmBackend as ShmBackend
    from device_comm.torch_backend import TorchBackend as TorchBackend
    from device_comm.watch import LoneWatch as LoneWatch
    from device_comm.watch import Watch as Watch
    from device_comm.work import AllPending as AllPending
    from device_comm.work import Pending as Pending
    from device_comm.work import Work as Work
    from device_comm.work import all_pending as all_pending
    from device_comm.wrappers import Wrapper as Wrapper
    from shm_broadcast import __version__ as __version__

require_extension("device_comm")

_HOMES: Final = {
    "device_comm.backend": "Backend Capabilities Identity LoopbackBackend",
    "device_comm.communicator": "Communicator",
    "device_comm.operation": "ALL_VERBS Operation ReduceOp check_reduction reduce_in_rank_order",
    "device_comm.shm.shm_backend": "ShmBackend",
    "device_comm.torch_backend": "TorchBackend",
    "device_comm.watch": "LoneWatch Watch",
    "device_comm.work": "AllPending Pending Work all_pending",
    "device_comm.wrappers": "Wrapper",
    "shm_broadcast": "__version__",
}
__all__ = sorted(name for names in _HOMES.values() for name in names.split())


def __getattr__(name: str) -> Any:
    # At first use: a pool's driver compares ranks without loading torch.
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
