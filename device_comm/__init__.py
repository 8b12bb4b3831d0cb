"""Moving tensors between the ranks of a group."""

from device_comm.base import ALL_VERBS, Call, Capabilities, DeviceCommunicator
from device_comm.loopback import LoopbackComm
from device_comm.reduce_op import ReduceOp, check_reduction, reduce_in_rank_order
from device_comm.shm_comm import ShmComm
from device_comm.torch_comm import TorchComm
from device_comm.watch import LoneWatch, Watch
from device_comm.work import Joined, Pending, Work, join

__all__ = [
    "ALL_VERBS",
    "Call",
    "Capabilities",
    "DeviceCommunicator",
    "Joined",
    "LoneWatch",
    "LoopbackComm",
    "Pending",
    "ReduceOp",
    "ShmComm",
    "TorchComm",
    "Watch",
    "Work",
    "check_reduction",
    "join",
    "reduce_in_rank_order",
]
