"""All-reduce by NCCL's kernels for windows, in which each rank reaches the memory of all.

A candidate of selection where NCCL is 2.27 or newer. NCCL takes these kernels if input and result
lie in windows, at the same places on all ranks, and the devices reach each other over NVLink; they
take fewer blocks than its others and less time for small tensors. So tensors are copied into a
window, and back. Input and result have a half each: it is reported that NCCL 2.28, in graphs, gives
wrong results in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from device_comm.cuda.staging import LIMIT, Staging
from device_comm.reduce_op import ReduceOp
from device_comm.wrappers.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_comm.cuda.nccl.nccl_backend import NcclBackend
    from device_comm.cuda.nccl.nccl_memory import NcclMemory
    from device_comm.operation import Operation
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline

_REDUCTIONS: Final = frozenset(
    (ReduceOp.SUM, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
)


def device_bytes(address: int, size: int, device: torch.device) -> Tensor:
    """A tensor over ``size`` bytes of memory of a device, which it does not keep alive."""

    class _There:
        __cuda_array_interface__: Any = {  # noqa: RUF012 - read once
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(_There(), device=device)


class NcclWindow(Wrapper):
    """The all-reduce of an `NcclBackend` by way of a window.

    Attributes:
        limit: the size in bytes of the largest tensor that it takes.
    """

    def __init__(
        self,
        nccl: NcclBackend,
        memory: NcclMemory,
        deadline: Deadline,
        view: Callable[[int, int, torch.device], Tensor] = device_bytes,
    ) -> None:
        """Make the window. Collective: yes, every member.

        Args:
            nccl: its maker closes it, and with it the window.
            memory: this rank's, from `allocate`; as large on all ranks.
            deadline: when all ranks must have come.
            view: makes a tensor of bytes of an address, a size and the device.

        Raises:
            NcclUnavailableError: NCCL makes no window of these devices' memory.
            CoordinatorError: another rank failed, or did not come.
        """
        has = replace(nccl.capabilities, verbs=frozenset({"all_reduce"}), reductions=_REDUCTIONS)
        super().__init__(nccl, capabilities=has, closes=False)
        nccl.register(memory, deadline)
        given, taken = view(memory.address, memory.size, nccl.device).chunk(2)
        self._nccl = nccl
        self._staging = Staging(given, taken, nccl.streams)
        self.limit = self._staging.limit

    @staticmethod
    def allocate(nccl: NcclBackend, limit: int = LIMIT) -> NcclMemory:
        """This rank's memory, for tensors of up to ``limit`` bytes. Collective: no.

        Raises:
            NcclUnavailableError: this NCCL has no windows.
            NcclError: there is not so much memory.
        """
        return nccl.allocate(2 * limit)

    def start(self, operation: Operation) -> Pending | None:
        """Copy the tensor into the window, reduce there, and copy the result out."""

        def step(given: Tensor, taken: Tensor) -> None:
            self._nccl.start(operation.instead(given, taken))

        self._staging.reduce(operation, self.capabilities, step)
        return self._nccl.after(operation)
