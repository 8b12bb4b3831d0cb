"""Run all verbs with NCCL on torch's current stream, and all-reduce through NCCL's windows.

Data is moved as bytes, so every dtype is moved. Reductions that NCCL lacks are exchanged, and
reduced by torch in rank order. Parts of different sizes are exchanged by grouped sends and
receives.

NCCL 2.27 has kernels for windows, if input and result have the same window offsets on all ranks,
and NVLink connects the devices. They use fewer blocks than other kernels and less time for small
tensors. So tensors are copied into a window, and back. Input and result have a half each: in place,
NCCL 2.28 is reported to return wrong results in graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from device_comm.cuda.nccl.core import NcclCore, NcclMemory
from device_comm.cuda.nccl.library import BYTE, NcclLibrary, NcclReduction, Op, nccl_reduction
from device_comm.cuda.symmetric_backend import LIMIT, Staging
from device_comm.operation import NO_TENSOR, REDUCTIONS, Operation, ReduceOp
from device_comm.torch_backend import as_bytes, reduce_here
from device_comm.work import Pending
from device_comm.wrappers import Wrapper
from shm_broadcast.deadline import Deadline

_BARRIER = NcclReduction(Op.MAX, BYTE)
"""A barrier is an all-reduce of one byte."""


class NcclBackend(NcclCore):
    """One rank's end of a group over NCCL. One thread at a time. Make it with `create`.

    Calls return when the work is queued on the stream, `barrier` when every rank has called it;
    CUDA graphs may capture all. If an operation fails later, misses its deadline, or waits for a
    lost peer, it is ended on the device, the group is aborted, and the next call raises. Destroy
    graphs with operations of this backend before closing it.

    A `send` ends, in stream order, when it is received. Each rank needs its own device: NCCL
    rejects ranks that share one.
    """

    def start(self, operation: Operation) -> Pending | None:
        """Issue the operation to NCCL."""
        if operation.verb in ("send", "recv"):
            return self._message(operation)
        if operation.verb == "barrier":
            self._reduce(operation.replace(self._token, self._token, verb="all_reduce"), _BARRIER)
            return self._arrival(operation)
        if operation.verb in REDUCTIONS:
            wire = nccl_reduction(operation.op, operation.source.dtype)
            if wire is None or operation.verb == "reduce_scatterv":
                moving, reduce = reduce_here(operation, self.rank, self.world_size)
                self._move(moving)
                reduce()
            else:
                self._reduce(operation, wire)
        else:
            self._move(operation)
        return self.after(operation)

    def _reduce(self, operation: Operation, wire: NcclReduction) -> None:
        """Issue a reduction, with conversions to NCCL's dtype and back if necessary."""
        source, output, root = operation.source, operation.output, operation.peer
        given = source if wire.wider is None else source.to(wire.wider)
        taken = output
        if output is not NO_TENSOR and wire.wider is not None:
            in_place = output.numel() == given.numel()
            taken = given if in_place else torch.empty_like(output, dtype=wire.wider)

        def enqueue(nccl: NcclLibrary, comm: int, stream: int) -> None:
            addresses, codes = (given.data_ptr(), taken.data_ptr()), (wire.dtype, wire.op)
            count = source.numel() * wire.width
            match operation.verb:
                case "reduce_scatter":
                    share = output.numel() * wire.width
                    nccl.reduce_scatter(*addresses, share, *codes, comm, stream)
                case "reduce":
                    nccl.reduce(*addresses, count, *codes, root, comm, stream)
                case "all_reduce":
                    nccl.all_reduce(*addresses, count, *codes, comm, stream)
                case other:
                    raise NotImplementedError(f"NCCL does not reduce in {other}")

        self._issue(operation, enqueue)
        if taken is not output:
            output.copy_(taken)

    def _move(self, operation: Operation) -> None:
        """Issue an operation without a reduction."""
        source, output, root = operation.source, operation.output, operation.peer
        n = self.world_size
        empty: list[Tensor | None] = [None] * n
        match operation.verb:
            case "all_gather":
                given, taken, size = source.data_ptr(), output.data_ptr(), source.nbytes
                self._issue(
                    operation,
                    lambda nccl, comm, stream: nccl.all_gather(
                        given, taken, size, BYTE, comm, stream
                    ),
                )
            case "broadcast":
                address, size = operation.buffer.data_ptr(), operation.buffer.nbytes
                self._issue(
                    operation,
                    lambda nccl, comm, stream: nccl.broadcast(
                        address, address, size, BYTE, root, comm, stream
                    ),
                )
            case "all_gatherv":
                received = _cut(output, operation.output_parts(n))
                self._exchange(operation, [as_bytes(source)] * n, received)
            case "all_to_all":
                sent = _cut(source, operation.source_parts(n))
                self._exchange(operation, sent, _cut(output, operation.output_parts(n)))
            case "gather":
                to_root = [*empty]
                to_root[root] = as_bytes(source)
                parts = empty if self.rank != root else as_bytes(output).chunk(n)
                self._exchange(operation, to_root, parts)
            case "scatter":
                from_root = [*empty]
                from_root[root] = as_bytes(output)
                parts = empty if self.rank != root else as_bytes(source).chunk(n)
                self._exchange(operation, parts, from_root)
            case other:
                raise NotImplementedError(f"NCCL does not move in {other}")

    def _exchange(
        self,
        operation: Operation,
        sent: Sequence[Tensor | None],
        received: Sequence[Tensor | None],
    ) -> None:
        """Exchange ``sent[r]`` and ``received[r]`` with each rank r; skip None."""
        own_sent, own_received = sent[self.rank], received[self.rank]
        if own_sent is not None and own_received is not None:
            own_received.copy_(own_sent)

        def enqueue(nccl: NcclLibrary, comm: int, stream: int) -> None:
            try:
                nccl.group_start()
                for peer, (outgoing, incoming) in enumerate(zip(sent, received, strict=True)):
                    if peer == self.rank:
                        continue
                    if outgoing is not None and outgoing.numel():
                        nccl.send(outgoing.data_ptr(), outgoing.numel(), BYTE, peer, comm, stream)
                    if incoming is not None and incoming.numel():
                        nccl.recv(incoming.data_ptr(), incoming.numel(), BYTE, peer, comm, stream)
            finally:
                nccl.group_end()

        self._issue(operation, enqueue)


def _cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the parts of ``x`` as bytes; ``sizes`` are in elements."""
    flat, width = as_bytes(x), x.element_size()
    ends = list(accumulate(size * width for size in sizes))
    return [flat[end - size * width : end] for size, end in zip(sizes, ends, strict=True)]


_REDUCTIONS: Final = frozenset(
    (ReduceOp.SUM, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
)


def device_bytes(address: int, size: int, device: torch.device) -> Tensor:
    """Return a tensor over ``size`` bytes of device memory, which it does not keep alive."""

    class _Memory:
        __cuda_array_interface__: Any = {  # noqa: RUF012 - read once
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(_Memory(), device=device)


class NcclWindow(Wrapper):
    """The all-reduce of an `NcclBackend` through a window, for up to ``limit`` bytes."""

    def __init__(
        self,
        nccl: NcclBackend,
        memory: NcclMemory,
        deadline: Deadline,
        view: Callable[[int, int, torch.device], Tensor] = device_bytes,
    ) -> None:
        """Register the window; see `NcclCore.register` for errors. Collective: yes, every member.

        The caller closes ``nccl``, which releases the window. ``memory`` is from `allocate`, of the
        same size on all ranks. ``view`` returns a byte tensor of an address, a size and the device.
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
        """Return memory for tensors of up to ``limit`` bytes; see `NcclMemory` for errors."""
        return nccl.allocate(2 * limit)

    def start(self, operation: Operation) -> Pending | None:
        """Copy the tensor into the window, reduce, and copy the result back."""

        def step(given: Tensor, taken: Tensor) -> None:
            self._nccl.start(operation.replace(given, taken))

        self._staging.reduce(operation, self.capabilities, step)
        return self._nccl.after(operation)
