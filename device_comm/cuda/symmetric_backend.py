"""All-reduce through torch's symmetric memory, for large sums over an NVLink switch.

The algorithm is two-shot NVLink SHARP: for each device, the switch sums one part of all tensors and
multicasts the sum. It supports SUM of float32 and bfloat16. Tensors are copied into memory that all
devices share, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.cuda.driver import CudaStreams, DeviceError, Stream, Streams
from device_comm.operation import Operation, ReduceOp
from device_comm.watch import Watch

LIMIT: Final = 16 << 20
"""The default size of the largest tensor, in bytes."""
_ALIGN: Final = 16


class Staging:
    """The memory for inputs and results of consecutive all-reduces.

    ``limit`` is the largest tensor's size in bytes.
    """

    def __init__(self, given: Tensor, taken: Tensor, streams: Streams) -> None:
        """Use byte tensors of equal size, possibly the same, for inputs and results."""
        self.limit = given.nbytes
        self._given = given
        self._taken = taken
        self._streams = streams
        self._last: Stream | None = None

    def reduce(
        self,
        operation: Operation,
        capabilities: Capabilities,
        step: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Run an all-reduce in order on the current stream.

        ``step`` reduces its first argument into its second. Both are as long as the operation's
        tensors, rounded up to 16 bytes. Raises `NotImplementedError` if the tensor is too large, or
        ``capabilities`` lack the reduction.
        """
        source, output, op = operation.source, operation.output, operation.op
        if not capabilities.reduces(op, source.dtype) or source.nbytes > self.limit:
            raise NotImplementedError(
                f"{operation.name}: no {op.name} of {source.nbytes} bytes of {source.dtype}"
            )
        self._follow()
        padded = -(-source.nbytes // _ALIGN) * _ALIGN
        given, taken = (each[:padded].view(source.dtype) for each in (self._given, self._taken))
        given[: source.numel()].copy_(source.view(-1))
        step(given, taken)
        output.view(-1).copy_(taken[: output.numel()])

    def _follow(self) -> None:
        """Make the current stream wait for the last use, except in a capture."""
        if self._streams.capturing():
            return
        stream, last = self._streams.current(), self._last
        if last is not None and last.address != stream.address:
            last.mark().stream_wait()
        self._last = stream


_REDUCTIONS: Final = frozenset({(ReduceOp.SUM, torch.float32), (ReduceOp.SUM, torch.bfloat16)})


class SymmetricBackend(Backend):
    """One rank's end of a group whose devices share a switch. CUDA graphs may capture its calls.

    It does not detect lost peers: use it only beside another backend of the group that does.
    ``limit`` is the largest tensor's size in bytes.
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

        ``group`` is a torch process group of the ranks, with NCCL; ``shared`` is from `allocate`,
        of the same size on all ranks. Other arguments are as for `Identity.of`.

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
            raise DeviceError("symmetric memory rendezvous", "no multicast address")

    @staticmethod
    def allocate(device: torch.device, limit: int = LIMIT) -> Tensor:
        """Return shared memory of ``limit`` bytes.

        Raises:
            DeviceError: the device has no multicast, or torch cannot detect it.
        """
        with _set_up("symmetric memory"):
            from torch._C._autograd import DeviceType  # noqa: PLC0415
            from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415
            from torch.distributed import _symmetric_memory  # noqa: PLC0415

            if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
                raise DeviceError("symmetric memory", f"{device} has no multicast")
            return _symmetric_memory.empty(limit, dtype=torch.uint8, device=device)

    def start(self, operation: Operation) -> None:
        """Copy the tensor into shared memory, reduce in the switch, and copy it back."""

        def step(shared: Tensor, _: Tensor) -> None:
            torch.ops.symm_mem.multimem_all_reduce_(shared, "sum", self._group)

        self._staging.reduce(operation, self.capabilities, step)


@contextmanager
def _set_up(step: str) -> Iterator[None]:
    """Translate all errors of torch's private, changing interface to `DeviceError`."""
    # Any other error would end this rank alone, while the others wait.
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        detail = str(error).partition("\n")[0]
        raise DeviceError(step, f"{type(error).__name__}: {detail}") from error
