"""Any torch process group as a communicator: the reference, and the oracle of the others.

Data is moved as bytes, so every dtype travels; `device_comm.torch_wire` says how reductions
do. Reduce-scatter is an exchange of parts and a local reduction in rank order, the same for
equal and unequal parts, and all-gather of unequal parts is an exchange too: gloo has neither.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from device_comm.base import Capabilities, DeviceCommunicator
from device_comm.guard import Guard
from device_comm.helper_threads import HelperThreads
from device_comm.reduce_op import ReduceOp, reduce_in_rank_order
from device_comm.torch_pending import (
    Boundary,
    CollectivePending,
    StreamPending,
    TransferPending,
    break_off,
    wait_to_the_end,
)
from device_comm.torch_wire import as_bytes, as_cargo, reduction_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.watch import Watch
    from device_comm.work import Pending

_TAG = 0


class TorchComm(DeviceCommunicator):
    """Collectives and p2p over a torch process group, which stays its maker's to destroy.

    Do not use the group beside this communicator: operations are matched in order. After an
    abort its connections are broken off, so that whatever waits in it ends, and it is never
    used again.

    With gloo, a call returns once the result is there, and a lost peer is noticed through
    the board. With NCCL a call returns once the work is in stream order; what fails later is
    left to NCCL's own watchdog.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        board: Watch | None = None,
        members: Sequence[int] | None = None,
        name: str = "group",
        timeout: float | None = 60.0,
    ) -> None:
        """Wrap ``process_group``. Collective: no.

        Args:
            process_group: of the ranks of this group; its backend must handle ``device``.
            device: where the tensors are.
            board: the group's `shm_broadcast.Board`; None: deadlines only.
            members: the board's member number of each rank; None: the rank itself.
            name: the group's name, for errors and status.
            timeout: seconds that a call allows unless it says otherwise; None: for ever.
                torch's own timeout of the group ends an operation too, if it is shorter.
        """
        backend = process_group._get_backend(torch.device(device)).name()
        super().__init__(
            rank=process_group.rank(),
            world_size=process_group.size(),
            device=device,
            capabilities=Capabilities(
                backend=backend,
                stream_ordered=backend == "nccl",
                detects_loss=board is not None and backend != "nccl",
            ),
            name=name,
            timeout=timeout,
            watch=board,
            members=members,
        )
        self._group = process_group
        self._boundary = Boundary(self.watch, board is not None)
        self._helpers = HelperThreads(f"{name}-transfer")
        self._guard = Guard(f"{name}-guard", self._boundary, self._discard)
        self._broken_off = False

    def _discard(self) -> None:
        if self.world_size > 1 and not self._broken_off:
            self._broken_off = True
            break_off(self._group)

    # --- collectives ---------------------------------------------------------------------

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOp, call: Call) -> Pending:
        wire = reduction_wire(op, source.dtype)
        if wire is None:
            parts = source.new_empty((self.world_size, *source.shape))
            return self._start(
                call,
                lambda: self._group._allgather_base(as_cargo(parts), as_cargo(source)),
                lambda: reduce_in_rank_order(parts.unbind(), op, output),
            )
        travelling = wire.wrap(output)
        wire.load(travelling, source)
        return self._start(
            call,
            lambda: self._group.allreduce([travelling], _all_reduce_options(wire.op)),
            lambda: wire.unload(travelling, output, self.world_size),
        )

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending:
        return self._start(
            call, lambda: self._group._allgather_base(as_cargo(output), as_cargo(source))
        )

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending:
        n = self.world_size
        return self._all_to_all(
            output, source.view(-1).repeat(n), sizes, [source.numel()] * n, call
        )

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOp, call: Call) -> Pending:
        sizes = [output.numel()] * self.world_size
        return self._reduce_scatterv(output, source, sizes, op, call)

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending:
        parts = source.new_empty((self.world_size, *output.shape))
        return self._exchange(
            parts,
            source,
            [output.numel()] * self.world_size,
            sizes,
            call,
            lambda: reduce_in_rank_order(parts.unbind(), op, output),
        )

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending:
        return self._exchange(output, source, output_sizes, source_sizes, call)

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start(call, lambda: self._group.broadcast([as_cargo(buffer)], options))

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending:
        wire = reduction_wire(op, source.dtype)
        if wire is None:
            parts = None if output is None else source.new_empty((self.world_size, *source.shape))

            def combine() -> None:
                if parts is not None and output is not None:
                    reduce_in_rank_order(parts.unbind(), op, output)

            return self._gather(parts, source, root, call, combine)
        # torch leaves partial sums in the tensor of every rank
        scratch = torch.empty_like(source) if output is None else output
        travelling = wire.wrap(scratch)
        wire.load(travelling, source)
        options = dist.ReduceOptions()
        options.reduceOp = wire.op.torch
        options.rootRank = root
        return self._start(
            call,
            lambda: self._group.reduce([travelling], options),
            None if output is None else lambda: wire.unload(travelling, output, self.world_size),
        )

    def _gather(
        self,
        output: Tensor | None,
        source: Tensor,
        root: int,
        call: Call,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        options = dist.GatherOptions()
        options.rootRank = root
        rows = [] if output is None else [list(as_bytes(output).chunk(self.world_size))]
        return self._start(
            call, lambda: self._group.gather(rows, [as_bytes(source)], options), finish
        )

    def _scatter(self, output: Tensor, source: Tensor | None, root: int, call: Call) -> Pending:
        options = dist.ScatterOptions()
        options.rootRank = root
        rows = [] if source is None else [list(as_bytes(source).chunk(self.world_size))]
        return self._start(call, lambda: self._group.scatter([as_bytes(output)], rows, options))

    def _barrier(self, call: Call) -> Pending:
        options = dist.BarrierOptions()
        if self.device.type != "cpu":
            options.device = self.device
        return self._start(call, lambda: self._group.barrier(options))

    # --- p2p -----------------------------------------------------------------------------

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        return self._transfer(call, peer, lambda: self._group.send([as_cargo(source)], peer, _TAG))

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        return self._transfer(call, peer, lambda: self._group.recv([as_cargo(output)], peer, _TAG))

    # --- starting ------------------------------------------------------------------------

    def _exchange(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        width = source.element_size()
        takes = [size * width for size in output_sizes]
        gives = [size * width for size in source_sizes]
        return self._start(
            call,
            lambda: self._group.alltoall_base(as_bytes(output), as_bytes(source), takes, gives),
            finish,
        )

    def _start(
        self, call: Call, issue: Callable[[], dist.Work], finish: Callable[[], None] | None = None
    ) -> Pending:
        work = self._issue(call, issue, self.peers)
        if self.capabilities.stream_ordered:
            return StreamPending(work, finish)
        return CollectivePending(work, finish, call.operation, self.peers, self._boundary)

    def _transfer(self, call: Call, peer: int, issue: Callable[[], dist.Work]) -> Pending | None:
        peers = (self.members[peer],)
        work = self._issue(call, issue, peers)
        if self.capabilities.stream_ordered:
            return StreamPending(work, None)
        if call.background:
            job = self._helpers.start(work.wait, self._wake)
            return TransferPending(job, call.operation, peers, self._boundary)
        deadline = call.deadline
        try:
            self._guard.call(lambda: wait_to_the_end(work, deadline), call.operation, peers)
        except RuntimeError as error:
            raise self._boundary.translate(error, call.operation, peers, deadline) from error
        return None

    def _issue(self, call: Call, issue: Callable[[], dist.Work], peers: Sequence[int]) -> dist.Work:
        try:
            return issue()
        except RuntimeError as error:
            raise self._boundary.translate(error, call.operation, peers, call.deadline) from error

    def _wake(self) -> None:
        if self.watch.member is not None:
            self.watch.ring(self.watch.member)


@cache
def _all_reduce_options(op: ReduceOp) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op.torch
    return options
