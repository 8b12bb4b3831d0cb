"""Run operations over any torch process group: the reference for the other backends.

Data is moved in a dtype that gloo supports, else as bytes, so every dtype is moved. Reductions in
transit use a dtype and an operation that both gloo and NCCL support:

    float32, float64, uint8, int8, int32, int64      unchanged
    float16, bfloat16                                widened to float32
    int16, uint16                                    widened to int32
    uint32                                           widened to int64
    bool                                             as uint8; SUM as MAX, PRODUCT as MIN
    complex, SUM and AVG                             as pairs of reals
    AVG                                              as SUM, divided by the receiver

For PRODUCT of complex numbers, and for MIN and MAX of floats (gloo loses a NaN in the second
operand), `transport_reduction` returns None: the parts are gathered and reduced locally.
Reduce-scatter is always an all-to-all and a local reduction in rank order, and all-gather of
unequal parts is an all-to-all: gloo has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from device_comm.backend import Backend, Capabilities, Identity, end_group
from device_comm.operation import (
    ALL_VERBS,
    NO_TENSOR,
    Operation,
    ReduceOp,
    Verb,
    reduce_in_rank_order,
)
from device_comm.torch_waiting import (
    HELPERS,
    CollectivePending,
    Connections,
    DrainAfterClose,
    ErrorTranslator,
    Job,
    StreamPending,
    TransferPending,
)
from device_comm.watch import Watch
from device_comm.watchdog import Issued, call_watched

if TYPE_CHECKING:
    from device_comm.work import Pending


_KNOWN = frozenset(
    {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_BOOL_OP = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as one-dimensional uint8."""
    return _flat(x).view(torch.uint8)


def as_transport_dtype(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, one-dimensional, in a supported dtype."""
    flat = _flat(x)
    return flat if x.dtype in _KNOWN else flat.view(torch.uint8)


def _flat(x: Tensor) -> Tensor:
    """Return a contiguous tensor as one dimension; a single element may have any stride."""
    return x.as_strided((x.numel(),), (1,))


@dataclass(frozen=True)
class TransportReduction:
    """The form in which a reduction is sent, with torch's operation ``op``.

    The tensor is converted to ``wider``; None: its memory is reinterpreted. The receiver divides by
    the number of ranks if ``average``.
    """

    op: ReduceOp
    wider: torch.dtype | None
    average: bool

    def wrap(self, x: Tensor) -> Tensor:
        """Return the tensor to send for ``x``: its memory, or a new uninitialised tensor."""
        if self.wider is not None:
            return torch.empty(x.shape, dtype=self.wider, device=x.device)
        if x.dtype is torch.bool:
            return x.view(torch.uint8)
        return torch.view_as_real(x) if x.is_complex() else x

    def load(self, wire: Tensor, source: Tensor) -> None:
        """Copy ``source`` into ``wire``, from `wrap`, unless they share memory."""
        if self.wider is not None:
            wire.copy_(source)
        elif wire.data_ptr() != source.data_ptr():
            wire.copy_(self.wrap(source))

    def unload(self, wire: Tensor, output: Tensor, world_size: int) -> None:
        """Convert the reduced ``wire`` into the result, the argument of `wrap`."""
        if self.average:
            wire.div_(world_size)
        if self.wider is not None:
            output.copy_(wire)


@cache
def transport_reduction(op: ReduceOp, dtype: torch.dtype) -> TransportReduction | None:
    """Return the form of ``op`` on ``dtype``; None if it must be reduced locally."""
    if op is ReduceOp.PRODUCT and dtype.is_complex:
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point:
        return None
    average = op is ReduceOp.AVG
    sent = ReduceOp.SUM if average else op
    if dtype is torch.bool:
        sent = _BOOL_OP.get(sent, sent)
    return TransportReduction(sent, _WIDER.get(dtype), average)


_MOVED_BY: dict[str, Verb] = {
    "all_reduce": "all_gather",
    "reduce": "gather",
    "reduce_scatter": "all_to_all",
    "reduce_scatterv": "all_to_all",
}


def reduce_here(
    operation: Operation, rank: int, world_size: int
) -> tuple[Operation, Callable[[], None]]:
    """Return the operation that moves a reduction's parts, and the local step that reduces them."""
    op, output = operation.op, operation.output
    verb = _MOVED_BY[operation.verb]
    each = operation.source.numel() if verb != "all_to_all" else output.numel()
    parts: Tensor = NO_TENSOR
    if verb != "gather" or rank == operation.peer:
        parts = operation.source.new_empty((world_size, each))
    sizes = operation.source_sizes
    moving = operation.replace(
        operation.source,
        parts,
        verb=verb,
        source_sizes=sizes,
        output_sizes=None if sizes is None else (each,) * world_size,
    )

    def reduce() -> None:
        if output.numel():
            reduce_in_rank_order(parts.unbind(), op, output.view(-1))

    return moving, reduce


_TAG = 0

_LONG = timedelta(seconds=1e7)
"""Effectively no deadline; torch's default is shorter."""


class TorchBackend(Backend):
    """A backend over a torch process group, which the caller destroys.

    Do not use the process group elsewhere: operations are matched in order. An abort breaks its
    connections, which ends all operations in it; it is then unusable.

    With gloo, a call returns when the result is complete, and a lost peer is detected through the
    board. With NCCL, a call returns when the work is in stream order; NCCL's own watchdog handles
    later failures.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        name: str = "group",
        timeout: float | None = 60.0,
        has_closed: Callable[[int], bool] | None = None,
    ) -> None:
        """Wrap ``process_group``, which has the ranks of this group and supports ``device``.

        Args:
            process_group: its own timeout applies as well, if shorter.
            watch: the group's `shm_broadcast.Board`; None: deadlines only.
            members: each rank's member number on the board; None: the rank itself.
            timeout: default time limit of a call in seconds; None: unlimited.
            has_closed: returns True if a member closed the group; None: unknown.
        """
        backend = process_group._get_backend(torch.device(device)).name()
        super().__init__(
            Identity.of(
                process_group.rank(),
                process_group.size(),
                device,
                name=name,
                timeout=timeout,
                watch=watch,
                members=members,
            ),
            Capabilities(
                backend=backend,
                verbs=ALL_VERBS,
                stream_ordered=backend == "nccl",
                detects_loss=watch is not None and backend != "nccl",
                series=True,
            ),
        )
        self._group = process_group
        self._has_closed = has_closed
        self._errors = ErrorTranslator(self.watch)
        self._connections = Connections(process_group)
        self._end = partial(_end, self.identity, self._connections)
        self._series: dict[int, Job] = {}
        self._closing.callback(self._series.clear)

    def discard(self) -> None:
        """Break the connections, so that all operations in them end."""
        self._connections.break_off()

    def start(self, operation: Operation) -> Pending | None:
        """Call torch's function for the verb."""
        match operation.verb:
            case "all_reduce":
                return self._all_reduce(operation)
            case "all_gather":
                return self._all_gather(operation)
            case "all_gatherv":
                return self._all_gatherv(operation)
            case "reduce_scatter" | "reduce_scatterv":
                return self._reduce_here(operation)
            case "all_to_all":
                return self._all_to_all(operation)
            case "broadcast":
                return self._broadcast(operation)
            case "reduce":
                return self._reduce(operation)
            case "gather":
                return self._gather(operation)
            case "scatter":
                return self._scatter(operation)
            case "send" | "recv":
                return self._transfer(operation)
            case "barrier":
                return self._barrier(operation)
        assert_never(operation.verb)

    # --- collectives ---------------------------------------------------------------------

    def _all_reduce(self, operation: Operation) -> Pending:
        source, output = operation.source, operation.output
        wire = transport_reduction(operation.op, source.dtype)
        if wire is None:
            return self._reduce_here(operation)
        sent = wire.wrap(output)
        wire.load(sent, source)
        return self._follow(
            operation,
            lambda: self._group.allreduce([sent], _all_reduce_options(wire.op)),
            lambda: wire.unload(sent, output, self.world_size),
        )

    def _reduce_here(self, operation: Operation) -> Pending:
        moving, reduce = reduce_here(operation, self.rank, self.world_size)
        if moving.verb == "all_gather":
            return self._all_gather(moving, reduce)
        if moving.verb == "gather":
            return self._gather(moving, reduce)
        return self._all_to_all(moving, reduce)

    def _all_gather(
        self, operation: Operation, finish: Callable[[], None] | None = None
    ) -> Pending:
        output, source = as_transport_dtype(operation.output), as_transport_dtype(operation.source)
        return self._follow(operation, lambda: self._group._allgather_base(output, source), finish)

    def _all_gatherv(self, operation: Operation) -> Pending:
        source, n = operation.source, self.world_size
        return self._all_to_all(
            operation.replace(
                source.view(-1).repeat(n),
                operation.output,
                verb="all_to_all",
                source_sizes=(source.numel(),) * n,
                output_sizes=operation.output_sizes,
            )
        )

    def _all_to_all(
        self, operation: Operation, finish: Callable[[], None] | None = None
    ) -> Pending:
        output, source = as_bytes(operation.output), as_bytes(operation.source)
        width, n = operation.source.element_size(), self.world_size
        received = [size * width for size in operation.output_parts(n)]
        sent = [size * width for size in operation.source_parts(n)]
        return self._follow(
            operation, lambda: self._group.alltoall_base(output, source, received, sent), finish
        )

    def _broadcast(self, operation: Operation) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = operation.peer
        tensor = as_transport_dtype(operation.buffer)
        return self._follow(operation, lambda: self._group.broadcast([tensor], options))

    def _reduce(self, operation: Operation) -> Pending:
        source, output = operation.source, operation.output
        wire = transport_reduction(operation.op, source.dtype)
        if wire is None:
            return self._reduce_here(operation)
        is_root = operation.peer == self.rank
        # torch writes partial sums to the tensor of every rank.
        sent = wire.wrap(output if is_root else torch.empty_like(source))
        wire.load(sent, source)
        options = dist.ReduceOptions()
        options.reduceOp = wire.op.torch
        options.rootRank = operation.peer
        return self._follow(
            operation,
            lambda: self._group.reduce([sent], options),
            (lambda: wire.unload(sent, output, self.world_size)) if is_root else None,
        )

    def _gather(self, operation: Operation, finish: Callable[[], None] | None = None) -> Pending:
        options = dist.GatherOptions()
        options.rootRank = operation.peer
        source, output = as_bytes(operation.source), operation.output
        rows = [] if output is NO_TENSOR else [list(as_bytes(output).chunk(self.world_size))]
        return self._follow(operation, lambda: self._group.gather(rows, [source], options), finish)

    def _scatter(self, operation: Operation) -> Pending:
        options = dist.ScatterOptions()
        options.rootRank = operation.peer
        source, output = operation.source, as_bytes(operation.output)
        rows = [] if source is NO_TENSOR else [list(as_bytes(source).chunk(self.world_size))]
        return self._follow(operation, lambda: self._group.scatter([output], rows, options))

    def _barrier(self, operation: Operation) -> Pending:
        options = dist.BarrierOptions()
        if self.device.type != "cpu":
            options.device = self.device
        return self._follow(operation, lambda: self._group.barrier(options))

    # --- pending operations --------------------------------------------------------------

    def _follow(
        self,
        operation: Operation,
        issue: Callable[[], dist.Work],
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Return a `Pending` for ``issue``, a torch call whose errors are the connections'."""
        if self.capabilities.stream_ordered:
            return StreamPending(self._issue(operation, issue, self.peers), finish)
        work = self._issue(operation, issue, self.peers)
        return CollectivePending(work, finish, operation.name, self.peers, self._errors)

    def _transfer(self, operation: Operation) -> Pending | None:
        peer, name = operation.peer, operation.name
        peers = (self.members[peer],)
        sends = operation.verb == "send"
        before = None if sends else self._series.get(peer)
        if operation.following is not None or (before is not None and not before.done):
            return self._receive_series(operation, before)
        tensor = as_transport_dtype(operation.source if sends else operation.output)
        move = self._group.send if sends else self._group.recv
        work = self._issue(operation, lambda: move([tensor], peer, _TAG), peers)
        if self.capabilities.stream_ordered:
            return StreamPending(work, None)
        if operation.background:
            job = HELPERS.start(work.wait, _bell(self.watch))
            return TransferPending(job, name, peers, self._errors, self._drain(peer))
        deadline = operation.deadline
        issued = Issued(name, deadline, peers, drain=self._drain(peer))
        try:
            call_watched(lambda: work.wait(_LONG), issued, self._errors, self._end)
        except RuntimeError as error:
            raise self._errors.translate(error, name, peers, deadline) from error
        return None

    def _receive_series(self, operation: Operation, before: Job | None) -> Pending | None:
        """Receive on a helper thread, after the series that it receives from the same rank."""
        group, peer, following = self._group, operation.peer, operation.following

        def receive(tensors: Sequence[Tensor]) -> None:
            for work in [
                group.recv([as_transport_dtype(tensor)], peer, _TAG)
                for tensor in tensors
                if tensor.numel()
            ]:
                work.wait()

        def receive_all() -> None:
            if before is not None:
                before.join()
            if following is None:
                receive([operation.output])
                return
            while tensors := following():
                receive(tensors)

        job = self._series[peer] = HELPERS.start(receive_all, _bell(self.watch))
        peers = (self.members[peer],)
        drain = self._drain(peer)
        pending = TransferPending(job, operation.name, peers, self._errors, drain)
        if operation.background:
            return pending
        pending.wait(operation.deadline)
        return None

    def _drain(self, peer: int) -> DrainAfterClose | None:
        return self._has_closed and DrainAfterClose(self._has_closed, self.members[peer])

    def _issue(
        self, operation: Operation, issue: Callable[[], dist.Work], peers: Sequence[int]
    ) -> dist.Work:
        try:
            return issue()
        except RuntimeError as error:
            raise self._errors.translate(
                error, operation.name, peers, operation.deadline
            ) from error


def _end(identity: Identity, connections: Connections, error: Exception) -> None:
    # Holds no reference to the backend, which the watchdog may outlive.
    end_group(identity, error)
    connections.break_off()


def _bell(watch: Watch) -> Callable[[], None]:
    # Holds no reference to the backend, which helper threads may outlive.
    member = watch.member
    return (lambda: None) if member is None else partial(watch.notify, member)


@cache
def _all_reduce_options(op: ReduceOp) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op.torch
    return options
