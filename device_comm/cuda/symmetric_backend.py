"""All-reduce by torch's symmetric memory, inside the NVLink switch between the devices (multimem).

The algorithm is NVLink SHARP in two shots: each device has the switch add up one part of all
tensors, and send the sum to all devices.

A candidate for large sums on machines whose devices share an NVLink switch with multicast. It only
does all_reduce, with SUM of float32 and bfloat16. Tensors are copied into memory that all devices
share, and back.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.cuda.device.streams import CudaStreams
from device_comm.cuda.errors import DeviceError
from device_comm.cuda.staging import LIMIT, Staging
from device_comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from device_comm.operation import Operation
    from device_comm.watch import Watch

_REDUCTIONS: Final = frozenset({(ReduceOp.SUM, torch.float32), (ReduceOp.SUM, torch.bfloat16)})


class SymmetricBackend(Backend):
    """One rank's end of a group whose devices share a switch. Calls can be captured into graphs.

    It does not notice lost peers: use it only beside another backend of the group, which does.

    Attributes:
        limit: the size in bytes of the largest tensor that it takes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        shared: Tensor,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Share memory with the other ranks. Collective: yes, every member.

        Args:
            group: a torch process group of the ranks, with NCCL.
            shared: this rank's, from `allocate`; as large on all ranks.
            name: the group's name, for errors and status.
            timeout: default seconds that a call may take; None: for ever.
            watch: the group's board; None: deadlines only.
            members: each rank's member number on the board; None: the rank itself.

        Raises:
            DeviceError: torch cannot share memory between these devices.
        """
        super().__init__(
            Identity.of(
                group.rank(),
                group.size(),
                shared.device,
                name=name,
                timeout=timeout,
                watch=watch,
                members=members,
            ),
            Capabilities(
                "multimem",
                verbs=frozenset({"all_reduce"}),
                stream_ordered=True,
                reductions=_REDUCTIONS,
            ),
        )
        self._group = group.group_name
        self._staging = Staging(shared, shared, CudaStreams(shared.device))
        self.limit = self._staging.limit
        with _set_up("symmetric memory rendezvous"):
            from torch.distributed import _symmetric_memory  # noqa: PLC0415 - not in every build

            handle = _symmetric_memory.rendezvous(shared, group)
        if not handle.multicast_ptr:
            raise DeviceError("symmetric memory rendezvous", "it has no multicast address")

    @staticmethod
    def allocate(device: torch.device, limit: int = LIMIT) -> Tensor:
        """Memory of ``limit`` bytes for a backend. Collective: no.

        Raises:
            DeviceError: the device does not support multicast, or torch cannot tell; says why.
        """
        with _set_up("symmetric memory"):
            from torch._C._autograd import DeviceType  # noqa: PLC0415
            from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415
            from torch.distributed import _symmetric_memory  # noqa: PLC0415

            if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
                raise DeviceError("symmetric memory", f"{device} has no multicast")
            return _symmetric_memory.empty(limit, dtype=torch.uint8, device=device)

    def start(self, operation: Operation) -> None:
        """Copy the tensor into the shared memory, reduce in the switch, and copy the result out."""

        def step(shared: Tensor, _: Tensor) -> None:
            torch.ops.symm_mem.multimem_all_reduce_(shared, "sum", self._group)

        self._staging.reduce(operation, self.capabilities, step)


@contextmanager
def _set_up(step: str) -> Iterator[None]:
    """Translate whatever torch says: its interface is private, and differs between versions. An
    error that is not the project's would end this rank alone, and leave the others waiting.
    """
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise DeviceError(step, f"{type(error).__name__}: {said}") from error
