"""Each algorithm of the IPC all-reduce as a candidate, so that measured times decide among them.

Which algorithm is fastest for a size depends on the machine: on how long a synchronisation of the
ranks takes, and on how fast they read each other's memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from device_comm.choosing.selection import Candidate
from device_comm.cuda.launches.launch import NUMBERS, Algorithm, kernels_reduce
from device_comm.reduce_op import ReduceOp
from device_comm.wrappers.wrapper import Wrapper

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.cuda.ipc.ipc_backend import IpcBackend
    from device_comm.operation import Operation
    from device_comm.work import Pending

_REDUCTIONS: Final = frozenset(
    (op, dtype) for op in ReduceOp for dtype in NUMBERS if kernels_reduce(op, dtype)
)


def ways(ipc: IpcBackend) -> list[Candidate]:
    """A candidate for each algorithm of ``ipc``; they do not close ``ipc``."""
    limits = {Algorithm.PACKETS: ipc.packet_bytes}
    return [
        Candidate(f"ipc {each.value}", IpcWay(ipc, each), up_to=limits.get(each))
        for each in Algorithm
    ]


class IpcWay(Wrapper):
    """The all-reduce of an `IpcBackend` by one fixed algorithm."""

    def __init__(self, ipc: IpcBackend, algorithm: Algorithm) -> None:
        """Use ``ipc``, which its maker closes. Collective: no."""
        normed = ipc.capabilities.normed if algorithm is Algorithm.PACKETS else frozenset()
        has = replace(
            ipc.capabilities,
            verbs=frozenset({"all_reduce"}),
            reductions=_REDUCTIONS,
            normed=normed,
        )
        super().__init__(ipc, capabilities=has, closes=False)
        self._ipc = ipc
        self._algorithm = algorithm

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """As `IpcBackend.norms`, by the algorithm."""
        return self._ipc.norms(x, weight, self._algorithm)

    def start(self, operation: Operation) -> Pending | None:
        """Reduce by the algorithm."""
        op, dtype = operation.op, operation.source.dtype
        if not self.capabilities.reduces(op, dtype):
            raise NotImplementedError(f"{operation.name}: no kernel for {op.name} of {dtype}")
        return self._ipc.start(operation, self._algorithm)
