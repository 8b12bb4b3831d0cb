"""Run all verbs with NCCL on torch's current stream, and all-reduce through NCCL's windows.

Data is moved as bytes, so every dtype works; `device_comm.cuda.nccl.library` maps reductions
to NCCL's. What NCCL cannot reduce is exchanged, and reduced by torch in rank order. Parts of
different sizes are exchanged by grouped sends and receives.

A candidate of selection where NCCL is 2.27 or newer. NCCL takes these kernels if input and result
lie in windows, at the same places on all ranks, and the devices reach each other over NVLink; they
take fewer blocks than its others and less time for small tensors. So tensors are copied into a
window, and back. Input and result have a half each: it is reported that NCCL 2.28, in graphs, gives
wrong results in place.
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

_MEETING = NcclReduction(Op.MAX, BYTE)
"""A barrier is an all-reduce of one byte."""


class NcclBackend(NcclCore):
    """One rank's end of a group over NCCL. One thread at a time. Make it with `create`.

    Calls return when the work is queued on the stream, `barrier` when every rank has called it;
    all can be captured into a graph. If an operation fails later, misses its deadline, or waits for
    a lost peer, it is ended on the device, the group is aborted, and the next call raises. Graphs
    with operations of this backend must be destroyed before it is closed.

    A `send` ends, in stream order, when it is received. Each rank needs a device of its own: NCCL
    refuses ranks that share one.
    """

    def start(self, operation: Operation) -> Pending | None:
        """Issue the operation to NCCL."""
        if operation.verb in ("send", "recv"):
            return self._message(operation)
        if operation.verb == "barrier":
            self._reduce(operation.replace(self._token, self._token, verb="all_reduce"), _MEETING)
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
        """Issue a reduction, converting to NCCL's dtype and back if need be."""
        source, output, root = operation.source, operation.output, operation.peer
        given = source if wire.wider is None else source.to(wire.wider)
        taken = output
        if output is not NO_TENSOR and wire.wider is not None:
            in_place = output.numel() == given.numel()
            taken = given if in_place else torch.empty_like(output, dtype=wire.wider)

        def enqueue(nccl: NcclLibrary, comm: int, stream: int) -> None:
            there, numbers = (given.data_ptr(), taken.data_ptr()), (wire.dtype, wire.op)
            count = source.numel() * wire.width
            match operation.verb:
                case "reduce_scatter":
                    share = output.numel() * wire.width
                    nccl.reduce_scatter(*there, share, *numbers, comm, stream)
                case "reduce":
                    nccl.reduce(*there, count, *numbers, root, comm, stream)
                case "all_reduce":
                    nccl.all_reduce(*there, count, *numbers, comm, stream)
                case other:
                    raise NotImplementedError(f"NCCL does not reduce in {other}")

        self._issue(operation, enqueue)
        if taken is not output:
            output.copy_(taken)

    def _move(self, operation: Operation) -> None:
        """Issue an operation that moves data without reducing it."""
        source, output, root = operation.source, operation.output, operation.peer
        n = self.world_size
        nothing: list[Tensor | None] = [None] * n
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
                at, size = operation.buffer.data_ptr(), operation.buffer.nbytes
                self._issue(
                    operation,
                    lambda nccl, comm, stream: nccl.broadcast(
                        at, at, size, BYTE, root, comm, stream
                    ),
                )
            case "all_gatherv":
                takes = _cut(output, operation.output_parts(n))
                self._exchange(operation, [as_bytes(source)] * n, takes)
            case "all_to_all":
                gives = _cut(source, operation.source_parts(n))
                self._exchange(operation, gives, _cut(output, operation.output_parts(n)))
            case "gather":
                to_root = [*nothing]
                to_root[root] = as_bytes(source)
                parts = nothing if self.rank != root else as_bytes(output).chunk(n)
                self._exchange(operation, to_root, parts)
            case "scatter":
                from_root = [*nothing]
                from_root[root] = as_bytes(output)
                parts = nothing if self.rank != root else as_bytes(source).chunk(n)
                self._exchange(operation, parts, from_root)
            case other:
                raise NotImplementedError(f"NCCL does not move in {other}")

    def _exchange(
        self,
        operation: Operation,
        gives: Sequence[Tensor | None],
        takes: Sequence[Tensor | None],
    ) -> None:
        """Send ``gives[r]`` to rank r and receive ``takes[r]`` from it, for all r; skip None."""
        mine, kept = gives[self.rank], takes[self.rank]
        if mine is not None and kept is not None:
            kept.copy_(mine)

        def enqueue(nccl: NcclLibrary, comm: int, stream: int) -> None:
            try:
                nccl.group_start()
                for peer, (give, take) in enumerate(zip(gives, takes, strict=True)):
                    if peer == self.rank:
                        continue
                    if give is not None and give.numel():
                        nccl.send(give.data_ptr(), give.numel(), BYTE, peer, comm, stream)
                    if take is not None and take.numel():
                        nccl.recv(take.data_ptr(), take.numel(), BYTE, peer, comm, stream)
            finally:
                nccl.group_end()

        self._issue(operation, enqueue)


def _cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of ``x`` as bytes; ``sizes`` are their numbers of elements."""
    flat, width = as_bytes(x), x.element_size()
    ends = list(accumulate(size * width for size in sizes))
    return [flat[end - size * width : end] for size, end in zip(sizes, ends, strict=True)]


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
            self._nccl.start(operation.replace(given, taken))

        self._staging.reduce(operation, self.capabilities, step)
        return self._nccl.after(operation)
