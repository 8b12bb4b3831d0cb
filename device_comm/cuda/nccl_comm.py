"""NCCL as a communicator: all verbs, on torch's current stream.

Data is moved as bytes, so every dtype travels; `device_comm.cuda.nccl_wire` says how reductions
do. What NCCL cannot reduce is exchanged, and reduced here in rank order. Shares of different
sizes travel as grouped sends and receives.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from device_comm.cuda.nccl_core import NcclCore
from device_comm.cuda.nccl_messages import Message
from device_comm.cuda.nccl_wire import BYTE, nccl_wire
from device_comm.reduce_op import ReduceOp, reduce_in_rank_order
from device_comm.torch_wire import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.cuda.nccl_library import NcclLibrary
    from device_comm.cuda.nccl_wire import NcclWire
    from device_comm.work import Pending

    Reduction = Callable[[NcclLibrary, int, int, int, int], bool]
    """Enqueues one, from an address to another, of a communicator on a stream."""


class NcclComm(NcclCore):
    """One rank's end of a group over NCCL. One thread at a time. Use `create`.

    Calls return once the work is in stream order, `barrier` once every rank has come; both can
    be captured into a graph. An operation that fails later, or is late, or whose peer is lost,
    is ended on the device, the group is aborted, and the next call raises. Graphs that hold
    operations of it have to be gone before it is closed.

    A `send` is done, in stream order, when it is received. No two ranks may share a device:
    NCCL refuses that.
    """

    # --- collectives ---------------------------------------------------------------------

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        wire = nccl_wire(op, source.dtype)
        if wire is None:
            parts = source.new_empty((self.world_size, *source.shape))
            self._all_gather(parts, source, call)
            reduce_in_rank_order(parts.unbind(), op, output)
            return self._after(call)
        count = source.numel() * wire.width
        return self._reduce_by(
            lambda nccl, given, taken, comm, stream: nccl.all_reduce(
                given, taken, count, wire.dtype, wire.op, comm, stream
            ),
            wire,
            source,
            output,
            call,
        )

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        self._issue(
            call,
            lambda nccl, comm, stream: nccl.all_gather(
                source.data_ptr(), output.data_ptr(), source.nbytes, BYTE, comm, stream
            ),
        )
        return self._after(call)

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        self._exchange(call, [as_bytes(source)] * self.world_size, _cut(output, sizes))
        return self._after(call)

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        wire = nccl_wire(op, source.dtype)
        if wire is None:
            sizes = [output.numel()] * self.world_size
            return self._reduce_scatterv(output, source, sizes, op, call)
        count = output.numel() * wire.width
        return self._reduce_by(
            lambda nccl, given, taken, comm, stream: nccl.reduce_scatter(
                given, taken, count, wire.dtype, wire.op, comm, stream
            ),
            wire,
            source,
            output,
            call,
        )

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        parts = source.new_empty((self.world_size, *output.shape))
        self._exchange(call, _cut(source, sizes), [as_bytes(part) for part in parts])
        if output.numel():
            reduce_in_rank_order(parts.unbind(), op, output)
        return self._after(call)

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        self._exchange(call, _cut(source, source_sizes), _cut(output, output_sizes))
        return self._after(call)

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        self._issue(
            call,
            lambda nccl, comm, stream: nccl.broadcast(
                buffer.data_ptr(), buffer.data_ptr(), buffer.nbytes, BYTE, root, comm, stream
            ),
        )
        return self._after(call)

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        wire = nccl_wire(op, source.dtype)
        if wire is None:
            parts = None if output is None else source.new_empty((self.world_size, *source.shape))
            self._gather(parts, source, root, call)
            if parts is not None and output is not None:
                reduce_in_rank_order(parts.unbind(), op, output)
            return self._after(call)
        count = source.numel() * wire.width
        return self._reduce_by(
            lambda nccl, given, taken, comm, stream: nccl.reduce(
                given, taken, count, wire.dtype, wire.op, root, comm, stream
            ),
            wire,
            source,
            output,
            call,
        )

    def _reduce_by(
        self,
        reduction: Reduction,
        wire: NcclWire,
        source: Tensor,
        output: Tensor | None,
        call: Call,
    ) -> Pending | None:
        """Issue a reduction into ``output``, where there is one, in what NCCL computes with."""
        given = source if wire.wider is None else source.to(wire.wider)
        taken = output
        if output is not None and wire.wider is not None:
            in_place = output.numel() == given.numel()
            taken = given if in_place else torch.empty_like(output, dtype=wire.wider)
        there = 0 if taken is None else taken.data_ptr()
        self._issue(
            call,
            lambda nccl, comm, stream: reduction(nccl, given.data_ptr(), there, comm, stream),
        )
        if output is not None and taken is not None and taken is not output:
            output.copy_(taken)
        return self._after(call)

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        nothing = [None] * self.world_size
        gives: list[Tensor | None] = [*nothing]
        gives[root] = as_bytes(source)
        takes = nothing if output is None else as_bytes(output).chunk(self.world_size)
        self._exchange(call, gives, takes)
        return self._after(call)

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        nothing = [None] * self.world_size
        takes: list[Tensor | None] = [*nothing]
        takes[root] = as_bytes(output)
        gives = nothing if source is None else as_bytes(source).chunk(self.world_size)
        self._exchange(call, gives, takes)
        return self._after(call)

    def _barrier(self, call: Call) -> Pending | None:
        self._all_reduce(self._token, self._token, ReduceOp.MAX, call)
        return self._arrival(call)

    # --- p2p -----------------------------------------------------------------------------

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        return self._send_message(Message(True, source, peer, call))

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        return self._send_message(Message(False, output, peer, call))

    # --- parts of different sizes --------------------------------------------------------

    def _exchange(
        self, call: Call, gives: Sequence[Tensor | None], takes: Sequence[Tensor | None]
    ) -> None:
        """Send ``gives[r]`` to each rank r and fill ``takes[r]`` from it; bytes, or nothing."""
        mine, kept = gives[self.rank], takes[self.rank]
        if mine is not None and kept is not None:
            kept.copy_(mine)

        def enqueue(nccl: NcclLibrary, comm: int, stream: int) -> bool:
            nccl.group_start()
            try:
                for peer, (give, take) in enumerate(zip(gives, takes, strict=True)):
                    if peer == self.rank:
                        continue
                    if give is not None and give.numel():
                        nccl.send(give.data_ptr(), give.numel(), BYTE, peer, comm, stream)
                    if take is not None and take.numel():
                        nccl.recv(take.data_ptr(), take.numel(), BYTE, peer, comm, stream)
            finally:
                busy = nccl.group_end()
            return busy

        self._issue(call, enqueue)


def _cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bytes of the parts of ``x`` that have ``sizes`` elements."""
    flat, width = as_bytes(x), x.element_size()
    ends = list(accumulate(size * width for size in sizes))
    return [flat[end - size * width : end] for size, end in zip(sizes, ends, strict=True)]
