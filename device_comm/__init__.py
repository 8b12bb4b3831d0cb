"""Moving tensors between the ranks of a group."""

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.communicator import Communicator
from device_comm.loopback import LoopbackBackend
from device_comm.operation import ALL_VERBS, Operation
from device_comm.reduce_op import ReduceOp, check_reduction, reduce_in_rank_order
from device_comm.shm.shm_backend import ShmBackend
from device_comm.torch_group.torch_backend import TorchBackend
from device_comm.watch import LoneWatch, Watch
from device_comm.work import Joined, Pending, Work, join
from device_comm.wrappers.wrapper import Wrapper
from shm_broadcast import __version__

__all__ = [
    "ALL_VERBS",
    "Backend",
    "Capabilities",
    "Communicator",
    "Identity",
    "Joined",
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
    "check_reduction",
    "join",
    "reduce_in_rank_order",
]
