"""All-reduce by torch's symmetric memory, in the switch that connects the devices (multimem).

A candidate for large sums on machines whose devices share an NVLink switch with multicast; it
has this one verb, for sums of float32 and bfloat16. Tensors are copied into memory that all
devices see, and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from device_comm.base import Capabilities, DeviceCommunicator
from device_comm.cuda.errors import DeviceError
from device_comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from device_comm.base import Call
    from device_comm.watch import Watch

_REDUCTIONS: Final = frozenset({(ReduceOp.SUM, torch.float32), (ReduceOp.SUM, torch.bfloat16)})
_LIMIT: Final = 16 << 20
_ALIGN: Final = 16


class SymmetricComm(DeviceCommunicator):
    """One rank's end of a group whose devices share a switch. Captures as any torch operation.

    A lost peer is not seen by it: the other communicators of the group are, which must be there
    as well.

    Attributes:
        limit: the bytes of a tensor that it takes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        limit: int = _LIMIT,
    ) -> None:
        """Share memory with the other ranks. Collective: yes, every member.

        Args:
            group: of the ranks, on NCCL; torch knows it by its name.
            device: this rank's, which `check` has accepted.
            name: for errors and status.
            timeout: seconds that a call allows unless it says otherwise; None: for ever.
            watch: the group's board; None: deadlines only.
            members: the board's member number of each rank; None: the rank itself.
            limit: bytes of memory that is shared, so of a tensor.

        Raises:
            DeviceError: torch cannot share memory between these devices.
        """
        super().__init__(
            rank=group.rank(),
            world_size=group.size(),
            device=device,
            capabilities=Capabilities(
                "multimem",
                verbs=frozenset({"all_reduce"}),
                stream_ordered=True,
                reductions=_REDUCTIONS,
            ),
            name=name,
            timeout=timeout,
            watch=watch,
            members=members,
        )
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - not in every build

        self.limit = limit
        self._group = group.group_name
        self._shared = _symmetric_memory.empty(limit, dtype=torch.uint8, device=device)
        try:
            handle = _symmetric_memory.rendezvous(self._shared, group)
        except RuntimeError as error:
            raise DeviceError("symmetric memory rendezvous", _first_line(error)) from error
        if not handle.multicast_ptr:
            raise DeviceError("symmetric memory rendezvous", "it has no multicast address")

    @staticmethod
    def check(device: torch.device) -> None:
        """Whether a device can be used. Collective: no.

        Raises:
            DeviceError: it cannot; says why.
        """
        try:
            from torch._C._autograd import DeviceType  # noqa: PLC0415
            from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415
        except ImportError as error:
            raise DeviceError("symmetric memory", f"this torch has none: {error}") from error
        try:
            able = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0)
        except RuntimeError as error:
            raise DeviceError("symmetric memory", _first_line(error)) from error
        if not able:
            raise DeviceError("symmetric memory", f"{device} has no multicast")

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOp, call: Call) -> None:
        if not self.capabilities.reduces(op, source.dtype) or source.nbytes > self.limit:
            raise NotImplementedError(
                f"{call.operation}: no {op.name} of {source.nbytes} bytes of {source.dtype}"
            )
        padded = -(-source.nbytes // _ALIGN) * _ALIGN
        shared = self._shared[:padded].view(source.dtype)
        shared[: source.numel()].copy_(source.view(-1))
        torch.ops.symm_mem.multimem_all_reduce_(shared, "sum", self._group)
        output.view(-1).copy_(shared[: source.numel()])


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
