"""Run collectives through shared memory: membership, plans, and their execution in order.

A plan runs chunk by chunk through the group's segment (`device_comm.shm.layout`), in the C
extension. A rank that has closed the group stores nothing more; a rank that waits for it checks
once more for stores before the close, then raises.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from torch import Tensor

from device_comm.operation import Operation, ReduceOp
from device_comm.shm.layout import GROUP_LEFT, RANK_PRESENT, GroupLayout
from device_comm.shm.signature import DTYPE_CODES, NO_OP, signature_of, signature_text
from device_comm.span import NOTHING, Span
from shm_broadcast.errors import (
    CoordinatorError,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    closed_by,
)
from shm_broadcast.segment import Segment
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from device_comm._native import Comm
    from device_comm.work import Pending
    from shm_broadcast.executor import ProgressEngine, SerialExecutor, Task


_PRESENT: Final = 1
_LEFT: Final = 2


class GroupMembership:
    """Which ranks (``members``, by number on the board) have joined or closed the group."""

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        rank: int,
        segment: Segment,
        layout: GroupLayout,
    ) -> None:
        self.members = members
        self._board = board
        self._words = segment.words
        self._own = layout.rank_line(rank) + RANK_PRESENT
        self._lines = [layout.rank_line(each) + RANK_PRESENT for each in range(len(members))]

    def join(self) -> None:
        """Publish that this rank has joined."""
        self._publish(_PRESENT)

    def mark_left(self) -> None:
        """Publish that this rank has closed the group and stores nothing more."""
        self._publish(_LEFT)

    def not_joined(self) -> list[int]:
        """Return the member numbers of the ranks that have not joined."""
        return [self.members[rank] for rank in self._where(0)]

    @property
    def anyone_left(self) -> bool:
        """Return True if a rank has closed the group; costs one load."""
        return self._words.load32(GROUP_LEFT) != 0

    def left(self) -> list[int]:
        """Return the ranks that have closed the group."""
        return self._where(_LEFT)

    def has_left(self, rank: int) -> bool:
        """Return True if ``rank`` has closed the group."""
        return self._words.load32(self._lines[rank]) == _LEFT

    def error(self, operation: str, rank: int) -> GroupClosedError:
        """Return the error of an operation that awaits ``rank``, which has closed the group.

        Raises:
            GroupAbortedError: the group was aborted for another reason.
        """
        try:
            self._board.check(operation)
        except GroupAbortedError as aborted:
            if aborted.failure.kind != GroupClosedError.__name__:
                raise
        return closed_by(operation, self._board.ranks[self.members[rank]])

    def abort_left(self, operation: str, rank: int) -> GroupClosedError:
        """Abort the group with `error`, as other ranks may have begun the operation; return it."""
        error = self.error(operation, rank)
        self._board.abort(error, self.members[rank])
        return error

    def _publish(self, state: int) -> None:
        self._words.store32(self._own, state)
        if state == _LEFT:
            self._words.store32(GROUP_LEFT, 1)
        for member in self.members:
            self._board.notify(member)

    def _where(self, state: int) -> list[int]:
        return [rank for rank, at in enumerate(self._lines) if self._words.load32(at) == state]


MOVE: Final = 0
"""Copy the piece of rank r into ``takes[r]``."""
REDUCE: Final = 1
"""Reduce the pieces of all ranks, in rank order, into ``takes[0]``."""
ALL_REDUCE: Final = 2
"""As `REDUCE`, in two phases: each rank reduces one part, then copies the others' parts."""


class SlotPlan(NamedTuple):
    """One rank's part in one collective.

    Attributes:
        kind: `MOVE`, `REDUCE` or `ALL_REDUCE`; reductions have ``dtype`` and ``op``.
        signature: compared with the other ranks'.
        awaits: by rank, 1 if this rank needs that rank's payload; 0 for itself.
        length: bytes of the longest piece of any rank; the same on all ranks.
        gives: the source of this rank's payload: empty, one span for all ranks, or one for each.
        takes: the destinations.
        addressed: payloads have a piece for each rank, not one for all; the same on all ranks.
        own: the address of this rank's piece for itself.
    """

    kind: int
    signature: bytes
    awaits: bytes
    dtype: int
    op: int
    length: int
    gives: tuple[Span, ...]
    takes: tuple[Span, ...]
    addressed: bool
    own: int


class SlotPlanner:
    """Makes the plans of one rank. Tensors are contiguous; sizes are in elements."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._n = world_size
        ranks = range(world_size)
        self._await_others = bytes(other != rank for other in ranks)
        self._await_none = bytes(world_size)
        self._await_only = [bytes(other == root for other in ranks) for root in ranks]

    def barrier(self, signature: bytes) -> SlotPlan:
        """Await all ranks, and move nothing."""
        return self._move(signature, self._await_others, 0)

    def all_reduce(
        self, signature: bytes, output: Tensor, source: Tensor, op: ReduceOp, whole_bytes: int
    ) -> SlotPlan:
        """Reduce the ranks' ``source``; up to ``whole_bytes`` in one phase."""
        kind = REDUCE if source.nbytes <= whole_bytes else ALL_REDUCE
        return self._reduce(signature, output, source, op, (Span.of(source),), kind=kind)

    def all_gather(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int]
    ) -> SlotPlan:
        """Concatenate every rank's ``source`` (``sizes[r]`` elements from rank r)."""
        return self._gather(signature, output, source, sizes, (Span.of(source),))

    def reduce_scatter(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> SlotPlan:
        """Reduce this rank's part of every rank's ``source`` (part r: ``sizes[r]`` elements)."""
        gives = _parts(source, sizes)
        return self._reduce(
            signature,
            output,
            source,
            op,
            gives,
            length=max(sizes) * source.itemsize,
            addressed=True,
            own=gives[self._rank].address,
        )

    def all_to_all(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        longest: int,
    ) -> SlotPlan:
        """Send part r to rank r, receive part r from it; ``longest``: of all parts."""
        gives = _parts(source, source_sizes)
        return self._move(
            signature,
            self._await_others,
            longest * source.itemsize,
            gives=gives,
            takes=_parts(output, output_sizes),
            addressed=True,
            own=gives[self._rank].address,
        )

    def broadcast(self, signature: bytes, buffer: Tensor, root: int) -> SlotPlan:
        """Copy the root's ``buffer`` to all ranks."""
        if root == self._rank:
            return self._move(signature, self._await_none, buffer.nbytes, gives=(Span.of(buffer),))
        takes = self._only(root, buffer)
        return self._move(signature, self._await_only[root], buffer.nbytes, takes=takes)

    def reduce(
        self, signature: bytes, output: Tensor, source: Tensor, root: int, op: ReduceOp
    ) -> SlotPlan:
        """Reduce the ranks' ``source`` into the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._await_none, source.nbytes, gives=(Span.of(source),))
        return self._reduce(signature, output, source, op, ())

    def gather(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Concatenate every rank's ``source`` in the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._await_none, source.nbytes, gives=(Span.of(source),))
        sizes = (source.numel(),) * self._n
        return self._gather(signature, output, source, sizes, ())

    def scatter(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Copy this rank's part of the root's ``source`` to ``output``."""
        takes = self._only(root, output)
        if root != self._rank:
            awaits = self._await_only[root]
            return self._move(signature, awaits, output.nbytes, takes=takes, addressed=True)
        gives = _parts(source, (output.numel(),) * self._n)
        return self._move(
            signature,
            self._await_none,
            output.nbytes,
            gives=gives,
            takes=takes,
            addressed=True,
            own=gives[root].address,
        )

    def table(self, signature: bytes, mine: Span, table: Span) -> SlotPlan:
        """Concatenate the ranks' rows, all of one size, in ``table``."""
        takes = tuple(Span(table.address + r * mine.size, mine.size) for r in range(self._n))
        return self._move(
            signature, self._await_others, mine.size, gives=(mine,), takes=takes, own=mine.address
        )

    def _move(
        self,
        signature: bytes,
        awaits: bytes,
        length: int,
        *,
        gives: tuple[Span, ...] = (),
        takes: tuple[Span, ...] = (),
        addressed: bool = False,
        own: int = 0,
    ) -> SlotPlan:
        return SlotPlan(MOVE, signature, awaits, 0, NO_OP, length, gives, takes, addressed, own)

    def _gather(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        sizes: Sequence[int],
        gives: tuple[Span, ...],
    ) -> SlotPlan:
        return self._move(
            signature,
            self._await_others,
            max(sizes) * source.itemsize,
            gives=gives,
            takes=_parts(output, sizes),
            own=source.data_ptr(),
        )

    def _reduce(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        op: ReduceOp,
        gives: tuple[Span, ...],
        *,
        kind: int = REDUCE,
        length: int | None = None,
        addressed: bool = False,
        own: int | None = None,
    ) -> SlotPlan:
        return SlotPlan(
            kind,
            signature,
            self._await_others,
            DTYPE_CODES[source.dtype],
            op,
            source.nbytes if length is None else length,
            gives,
            (Span.of(output),),
            addressed,
            source.data_ptr() if own is None else own,
        )

    def _only(self, root: int, buffer: Tensor) -> tuple[Span, ...]:
        return (*(NOTHING,) * root, Span.of(buffer), *(NOTHING,) * (self._n - root - 1))


def _parts(tensor: Tensor, sizes: Sequence[int]) -> tuple[Span, ...]:
    address, itemsize = tensor.data_ptr(), tensor.itemsize
    spans = []
    for size in sizes:
        spans.append(Span(address, size * itemsize))
        address += size * itemsize
    return tuple(spans)


class Status(IntEnum):
    """The state of a plan after `Steps.advance`."""

    DONE = 0
    BLOCKED = 1
    DIVERGED = 2


_WORD: Final = 8
"""Bytes of a size in the table that the ranks exchange."""


class Plans:
    """Makes the plans of one rank's collectives.

    If sizes differ by rank, the ranks exchange them first: a mismatch raises before data is used.
    """

    def __init__(self, rank: int, world_size: int, whole_bytes: int) -> None:
        self._planner = SlotPlanner(rank, world_size)
        self._rank = rank
        self._n = world_size
        self._whole_bytes = whole_bytes

    def of(self, operation: Operation) -> Iterator[SlotPlan]:
        """Return the plans of a collective; the caller runs each before it requests the next."""
        planner, source, output = self._planner, operation.source, operation.output
        signature, op, root = signature_of(operation), operation.op, operation.peer
        match operation.verb:
            case "all_reduce":
                plan = planner.all_reduce(signature, output, source, op, self._whole_bytes)
            case "all_gather":
                sizes = operation.output_parts(self._n)
                plan = planner.all_gather(signature, output, source, sizes)
            case "all_gatherv":
                sizes = operation.output_parts(self._n)
                plan = planner.all_gather(signature, output, source, sizes)
                return self._agreed(operation.verb, signature, sizes, plan)
            case "reduce_scatter":
                sizes = operation.source_parts(self._n)
                plan = planner.reduce_scatter(signature, output, source, sizes, op)
            case "reduce_scatterv":
                sizes = operation.source_parts(self._n)
                plan = planner.reduce_scatter(signature, output, source, sizes, op)
                return self._agreed(operation.verb, signature, sizes, plan)
            case "broadcast":
                plan = planner.broadcast(signature, operation.buffer, root)
            case "reduce":
                plan = planner.reduce(signature, output, source, root, op)
            case "gather":
                plan = planner.gather(signature, output, source, root)
            case "scatter":
                plan = planner.scatter(signature, output, source, root)
            case "all_to_all" if operation.source_sizes is not None:
                return self._all_to_all(signature, operation)
            case "all_to_all":
                takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
                plan = planner.all_to_all(signature, output, source, takes, gives, gives[0])
            case "barrier":
                plan = planner.barrier(signature)
            case "send" | "recv":
                raise ValueError(f"{operation.name}: messages have no plans")
            case _:
                assert_never(operation.verb)
        return iter((plan,))

    def _agreed(
        self, verb: str, signature: bytes, sizes: Sequence[int], plan: SlotPlan
    ) -> Generator[SlotPlan, None, None]:
        table = yield from self._exchange(signature, sizes)
        for rank, row in enumerate(table):
            if row != list(sizes):
                raise DivergenceError(rank, f"{verb} of {list(sizes)}", f"{verb} of {row}")
        yield plan

    def _all_to_all(
        self, signature: bytes, operation: Operation
    ) -> Generator[SlotPlan, None, None]:
        takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
        table = yield from self._exchange(signature, gives)
        for rank, row in enumerate(table):
            if row[self._rank] != takes[rank]:
                raise DivergenceError(
                    rank,
                    f"all_to_all that receives {takes[rank]} elements from that rank",
                    f"all_to_all that sends {row[self._rank]} elements to rank {self._rank}",
                )
        longest = max(max(row) for row in table)
        output, source = operation.output, operation.source
        yield self._planner.all_to_all(signature, output, source, takes, gives, longest)

    def _exchange(
        self, signature: bytes, sizes: Sequence[int]
    ) -> Generator[SlotPlan, None, list[list[int]]]:
        """Yield a plan that exchanges sizes; return the sizes by rank."""
        row, table = array("Q", sizes), array("Q", bytes(_WORD * self._n * self._n))
        yield self._planner.table(signature, _span_of(row), _span_of(table))
        numbers = table.tolist()
        return [numbers[r * self._n : (r + 1) * self._n] for r in range(self._n)]


def _span_of(numbers: array[int]) -> Span:
    address, count = numbers.buffer_info()
    return Span(address, count * _WORD)


class Collective:
    """One collective in progress; a `shm_broadcast.executor.Task`."""

    def __init__(
        self,
        steps: Comm,
        membership: GroupMembership,
        operation: str,
        plans: Iterator[SlotPlan],
        keep: object = None,
        *,
        call: int = 0,
        begun: bool = False,
    ) -> None:
        """Run ``plans`` on ``steps``, exclusively; each is requested when the previous one is done.

        With ``begun``, ``steps`` have begun a plan, which runs first. ``keep`` keeps the tensors'
        memory alive.
        """
        self.operation = operation
        self._steps = steps
        self._membership = membership
        self._plans = plans
        self._keep = keep
        self._begun = begun
        self._call = call

    def advance(self, spin_ns: int) -> bool:
        """Run as far as possible, or for a few MiB; return True at the end.

        Raises:
            DivergenceError: another rank is in another operation.
            GroupClosedError: an awaited rank has closed the group, which is aborted.
        """
        while True:
            if not self._begun:
                plan = next(self._plans, None)
                if plan is None:
                    return True
                self._steps.begin(plan, self._call)
                self._begun = True
            status = self._steps.advance(spin_ns)
            if status == Status.BLOCKED and self._membership.anyone_left:
                status = self._advance_without_left_ranks()
            if status == Status.BLOCKED:
                return False
            if status == Status.DIVERGED:
                self._raise_divergence()
            self._begun = False

    def ready(self) -> bool:
        """Return True if `advance` makes progress or raises."""
        return not self._begun or self._steps.ready() or self._awaits_left_rank()

    def missing(self) -> list[int]:
        """Return the member numbers of the awaited ranks."""
        members = self._membership.members
        return [members[rank] for rank in self._steps.missing()] if self._begun else []

    def check_divergence(self) -> None:
        """Raise `DivergenceError` if a rank has arrived in another operation."""
        if self._begun and self._steps.divergent() is not None:
            self._raise_divergence()

    def _awaits_left_rank(self) -> bool:
        membership = self._membership
        return membership.anyone_left and any(map(membership.has_left, self._steps.missing()))

    def _advance_without_left_ranks(self) -> int:
        left = self._membership.left()
        # Once more: their stores that preceded the close are visible now.
        status = self._steps.advance(0)
        if status == Status.BLOCKED:
            for rank in self._steps.missing():
                if rank in left:
                    raise self._membership.abort_left(self.operation, rank)
        return status

    def _raise_divergence(self) -> None:
        divergence = self._steps.divergent()
        if divergence is not None:
            rank, ours, theirs = divergence
            raise DivergenceError(rank, signature_text(ours), signature_text(theirs))


class Executors:
    """The serial executors of one rank's collectives, and of its messages by verb and peer."""

    def __init__(self, progress: ProgressEngine, fail: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self.fail = fail
        self.collectives = progress.executor(fail)
        self.messages: dict[tuple[str, int], SerialExecutor] = {}

    def message_executor(self, verb: str, peer: int) -> SerialExecutor:
        """Return the executor of the messages of ``verb`` with ``peer``; make it if necessary."""
        executor = self.messages.get((verb, peer))
        if executor is None:
            executor = self.messages[verb, peer] = self._progress.executor(self.fail)
        return executor

    def submit(self, executor: SerialExecutor, task: Task, operation: Operation) -> Pending | None:
        """Run ``task`` for ``operation`` on an executor, after the tasks submitted before."""
        try:
            return executor.submit(
                task, lambda: operation.deadline, operation.background, operation.ended
            )
        except GroupAbortedError:
            if isinstance(task, Collective):
                task.check_divergence()
            raise
        except CoordinatorError:
            raise
        except BaseException as error:
            # `Steps.begin` raises if the previous plan failed; the abort of the group is the cause.
            if isinstance(error, RuntimeError):
                executor.board.check(task.operation)
            # An interrupted operation leaves this rank out of step with the others.
            executor.board.abort(error)
            raise
