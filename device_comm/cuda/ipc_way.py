"""The protocols of an all-reduce as candidates of their own, so that a table decides among them.

Which is the quickest for a size depends on the machine: on what a meeting of the ranks costs
there, and on how fast they read each other's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from device_comm.base import Capabilities, DeviceCommunicator
from device_comm.cuda.launch import NUMBERS, Protocol, kernels_reduce
from device_comm.reduce_op import ReduceOp
from device_comm.select import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.cuda.ipc_comm import IpcComm
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline

_REDUCTIONS: Final = frozenset(
    (op, dtype) for op in ReduceOp for dtype in NUMBERS if kernels_reduce(op, dtype)
)


def ways(ipc: IpcComm) -> list[Candidate]:
    """A candidate for each protocol of ``ipc``, which is used beside them and closed apart."""
    limits = {Protocol.PACKETS: ipc.packet_bytes}
    return [
        Candidate(f"ipc {each.value}", IpcWay(ipc, each), up_to=limits.get(each))
        for each in Protocol
    ]


class IpcWay(DeviceCommunicator):
    """The all-reduce of an `IpcComm` by one protocol."""

    def __init__(self, ipc: IpcComm, protocol: Protocol) -> None:
        """Use ``ipc``. Collective: no."""
        super().__init__(
            rank=ipc.rank,
            world_size=ipc.world_size,
            device=ipc.device,
            capabilities=Capabilities(
                "ipc",
                verbs=frozenset({"all_reduce"}),
                stream_ordered=True,
                detects_loss=ipc.capabilities.detects_loss,
                sends_ahead=ipc.capabilities.sends_ahead,
                reductions=_REDUCTIONS,
            ),
            name=ipc.name,
            timeout=ipc.timeout,
            watch=ipc.watch,
            members=ipc.members,
        )
        self._ipc = ipc
        self._way = protocol

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """As that of the communicator. Collective: no."""
        self._ipc.flush(timeout)

    def _discard(self) -> None:
        self._ipc._discard()

    def _launch(self, primitive: Callable[[Call], Pending | None], call: Call) -> Pending | None:
        return self._ipc._launch(primitive, call)

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        if not self.capabilities.reduces(op, source.dtype):
            raise NotImplementedError(
                f"{call.operation}: no kernel for {op.name} of {source.dtype}"
            )
        return self._ipc._all_reduce_by(self._way, output, source, op, call)
