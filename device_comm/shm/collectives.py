"""Run collectives through shared memory: which ranks joined and left, plans, and running them in
order.

A rank that has closed the group does nothing more in it. So whoever waits for it looks once more
for what it did before, and raises if that is not enough.

A plan is carried out chunk by chunk through the memory of the group (see `device_comm.shm.layout`),
by the C extension.
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
    """What one rank says of itself, and sees of the others.

    Attributes:
        members: the board's member number of each rank.
    """

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        rank: int,
        segment: Segment,
        layout: GroupLayout,
    ) -> None:
        """In the group's segment, which has that layout. Collective: no."""
        self.members = members
        self._board = board
        self._words = segment.words
        self._own = layout.rank_line(rank) + RANK_PRESENT
        self._lines = [layout.rank_line(each) + RANK_PRESENT for each in range(len(members))]

    def join(self) -> None:
        """Say that this rank is there."""
        self._publish(_PRESENT)

    def mark_left(self) -> None:
        """Say that this rank does nothing more in the group."""
        self._publish(_LEFT)

    def not_joined(self) -> list[int]:
        """The member numbers of the ranks that have not come yet."""
        return [self.members[rank] for rank in self._where(0)]

    @property
    def anyone_left(self) -> bool:
        """Whether a rank has closed the group; costs one load."""
        return self._words.load32(GROUP_LEFT) != 0

    def left(self) -> list[int]:
        """The ranks that have closed the group."""
        return self._where(_LEFT)

    def has_left(self, rank: int) -> bool:
        """Whether that rank has closed the group."""
        return self._words.load32(self._lines[rank]) == _LEFT

    def error(self, operation: str, rank: int) -> GroupClosedError:
        """The error of an operation that needs a rank that has closed the group.

        Raises:
            GroupAbortedError: the group was aborted for another reason, so that rank has closed it.
        """
        try:
            self._board.check(operation)
        except GroupAbortedError as aborted:
            if aborted.failure.kind != GroupClosedError.__name__:
                raise
        return closed_by(operation, self._board.ranks[self.members[rank]])

    def abort_left(self, operation: str, rank: int) -> GroupClosedError:
        """As `error`, of an operation that cannot be taken back: aborts the group with it."""
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
"""What comes is copied: from rank r into ``takes[r]``."""
REDUCE: Final = 1
"""What comes is reduced in rank order, with this rank's own, into ``takes[0]``."""
ALL_REDUCE: Final = 2
"""As `REDUCE`, but each rank reduces one part, and the parts are shared out."""


class SlotPlan(NamedTuple):
    """What one rank does in one collective.

    Attributes:
        kind: `MOVE`, `REDUCE` or `ALL_REDUCE`.
        signature: what all ranks must agree on.
        awaits: by rank, 1 if this rank needs what that one puts; 0 for itself.
        dtype: the code of the elements, for reductions.
        op: the reduction, or `NO_OP`.
        length: bytes of the longest piece that any rank puts; the same on all ranks.
        gives: what this rank puts: one span for all ranks, or one for each; none at all.
        takes: where what comes goes.
        addressed: ranks put a piece for each rank, not one for all; the same on all ranks.
        own: the address of what this rank has for itself.
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
    """Makes the plans of one rank. Tensors are contiguous; sizes are in elements.

    Each is given the signature of what it plans.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._n = world_size
        everyone = range(world_size)
        self._everyone = bytes(other != rank for other in everyone)
        self._nobody = bytes(world_size)
        self._only_rank = [bytes(other == root for other in everyone) for root in everyone]

    def barrier(self, signature: bytes) -> SlotPlan:
        """Meet, and move nothing."""
        return self._move(signature, self._everyone, 0)

    def all_reduce(
        self, signature: bytes, output: Tensor, source: Tensor, op: ReduceOp, whole_bytes: int
    ) -> SlotPlan:
        """Reduce all ``source``; those of up to ``whole_bytes`` in one step."""
        kind = REDUCE if source.nbytes <= whole_bytes else ALL_REDUCE
        return self._reduce(signature, output, source, op, (Span.of(source),), kind=kind)

    def all_gather(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int]
    ) -> SlotPlan:
        """Put all ``source``, of which rank r's has ``sizes[r]``, in a row."""
        return self._gather(signature, output, source, sizes, (Span.of(source),))

    def reduce_scatter(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> SlotPlan:
        """Reduce this rank's part of all ``source``, whose part r has ``sizes[r]``."""
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
        """Give part r to rank r, put what rank r gives in part r; ``longest`` of all parts."""
        gives = _parts(source, source_sizes)
        return self._move(
            signature,
            self._everyone,
            longest * source.itemsize,
            gives=gives,
            takes=_parts(output, output_sizes),
            addressed=True,
            own=gives[self._rank].address,
        )

    def broadcast(self, signature: bytes, buffer: Tensor, root: int) -> SlotPlan:
        """Fill ``buffer`` with the root's."""
        if root == self._rank:
            return self._move(signature, self._nobody, buffer.nbytes, gives=(Span.of(buffer),))
        takes = self._only(root, buffer)
        return self._move(signature, self._only_rank[root], buffer.nbytes, takes=takes)

    def reduce(
        self, signature: bytes, output: Tensor, source: Tensor, root: int, op: ReduceOp
    ) -> SlotPlan:
        """Reduce into the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._nobody, source.nbytes, gives=(Span.of(source),))
        return self._reduce(signature, output, source, op, ())

    def gather(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Put all ``source`` in a row in the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._nobody, source.nbytes, gives=(Span.of(source),))
        sizes = (source.numel(),) * self._n
        return self._gather(signature, output, source, sizes, ())

    def scatter(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Fill ``output`` with this rank's part of the root's ``source``."""
        takes = self._only(root, output)
        if root != self._rank:
            awaits = self._only_rank[root]
            return self._move(signature, awaits, output.nbytes, takes=takes, addressed=True)
        gives = _parts(source, (output.numel(),) * self._n)
        return self._move(
            signature,
            self._nobody,
            output.nbytes,
            gives=gives,
            takes=takes,
            addressed=True,
            own=gives[root].address,
        )

    def table(self, signature: bytes, mine: Span, table: Span) -> SlotPlan:
        """Put the tables of all ranks, of one size, in a row."""
        takes = tuple(Span(table.address + r * mine.size, mine.size) for r in range(self._n))
        return self._move(
            signature, self._everyone, mine.size, gives=(mine,), takes=takes, own=mine.address
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
            self._everyone,
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
            self._everyone,
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
    """The parts of a tensor, one after the other."""
    address, itemsize = tensor.data_ptr(), tensor.itemsize
    spans = []
    for size in sizes:
        spans.append(Span(address, size * itemsize))
        address += size * itemsize
    return tuple(spans)


class Status(IntEnum):
    """How far a plan has come."""

    DONE = 0
    BLOCKED = 1
    DIVERGED = 2


_WORD: Final = 8
"""Bytes of a size that ranks tell each other."""


class Plans:
    """Makes the plans of one rank's collectives.

    Where every rank's share has its own size, the ranks first tell each other the sizes, so that
    they notice if these do not match before they touch each other's data.
    """

    def __init__(self, rank: int, world_size: int, whole_bytes: int) -> None:
        """For a rank; all-reduces of up to ``whole_bytes`` are one step."""
        self._planner = SlotPlanner(rank, world_size)
        self._rank = rank
        self._n = world_size
        self._whole_bytes = whole_bytes

    def of(self, operation: Operation) -> Iterator[SlotPlan]:
        """What to carry out, one after the other; the next is asked for when the last is done."""
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
        """``plan``, once all ranks have told the same sizes."""
        table = yield from self._swap(signature, sizes)
        for rank, row in enumerate(table):
            if row != list(sizes):
                raise DivergenceError(rank, f"{verb} of {list(sizes)}", f"{verb} of {row}")
        yield plan

    def _all_to_all(
        self, signature: bytes, operation: Operation
    ) -> Generator[SlotPlan, None, None]:
        """Plans that give each rank its part of every rank's source."""
        takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
        table = yield from self._swap(signature, gives)
        for rank, row in enumerate(table):
            if row[self._rank] != takes[rank]:
                raise DivergenceError(
                    rank,
                    f"all_to_all that takes {takes[rank]} elements from it",
                    f"all_to_all that gives {row[self._rank]} elements to rank {self._rank}",
                )
        longest = max(max(row) for row in table)
        output, source = operation.output, operation.source
        yield self._planner.all_to_all(signature, output, source, takes, gives, longest)

    def _swap(
        self, signature: bytes, sizes: Sequence[int]
    ) -> Generator[SlotPlan, None, list[list[int]]]:
        """Plans after which this rank knows every rank's sizes, which are returned by rank."""
        mine, table = array("Q", sizes), array("Q", bytes(_WORD * self._n * self._n))
        yield self._planner.table(signature, _span_of(mine), _span_of(table))
        numbers = table.tolist()
        return [numbers[r * self._n : (r + 1) * self._n] for r in range(self._n)]


def _span_of(numbers: array[int]) -> Span:
    address, count = numbers.buffer_info()
    return Span(address, count * _WORD)


class Collective:
    """One collective on its way; a `shm_broadcast.executor.Task`."""

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
        """Carry out ``plans`` by ``steps``; the next is asked for when the last is done.

        Args:
            steps: nobody else uses them until this is done.
            attendance: says which ranks have closed the group.
            operation: what this is, for messages.
            plans: one or more.
            keep: the tensors whose memory is used.
            call: the number of the call that this is part of; 0: none.
            begun: ``steps`` have a plan already, which comes first.
        """
        self.operation = operation
        self._steps = steps
        self._membership = membership
        self._plans = plans
        self._keep = keep
        self._begun = begun
        self._call = call

    def advance(self, spin_ns: int) -> bool:
        """Go on as far as possible, or for a few MiB; whether all is done.

        Raises:
            DivergenceError: another rank is in another operation.
            GroupClosedError: a rank that is needed has closed the group, which is aborted.
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
                status = self._advance_without_those_that_left()
            if status == Status.BLOCKED:
                return False
            if status == Status.DIVERGED:
                self._raise_divergence()
            self._begun = False

    def ready(self) -> bool:
        """Whether `advance` would get further."""
        return not self._begun or self._steps.ready() or self._lacks_one()

    def missing(self) -> list[int]:
        """The members that have not arrived."""
        members = self._membership.members
        return [members[rank] for rank in self._steps.missing()] if self._begun else []

    def check_divergence(self) -> None:
        """Raise `DivergenceError` if a rank has arrived in another operation."""
        if self._begun and self._steps.divergent() is not None:
            self._raise_divergence()

    def _lacks_one(self) -> bool:
        membership = self._membership
        return membership.anyone_left and any(map(membership.has_left, self._steps.missing()))

    def _advance_without_those_that_left(self) -> int:
        """Look once more for what they did before they left."""
        left = self._membership.left()
        status = self._steps.advance(0)
        if status == Status.BLOCKED:
            for rank in self._steps.missing():
                if rank in left:
                    raise self._membership.abort_left(self.operation, rank)
        return status

    def _raise_divergence(self) -> None:
        found = self._steps.divergent()
        if found is not None:
            rank, ours, theirs = found
            raise DivergenceError(rank, signature_text(ours), signature_text(theirs))


class Executors:
    """Where operations take place.

    Attributes:
        collectives: all of them take place here, one after the other.
        messages: one lane for each direction, ``send`` or ``recv``, and rank at the other end, once
            there was a message.
        fail: ends the group with an error.
    """

    def __init__(self, progress: ProgressEngine, fail: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self.fail = fail
        self.collectives = progress.executor(fail)
        self.messages: dict[tuple[str, int], SerialExecutor] = {}

    def message_executor(self, verb: str, peer: int) -> SerialExecutor:
        """The lane of such messages, which is made if there was none before."""
        lane = self.messages.get((verb, peer))
        if lane is None:
            lane = self.messages[verb, peer] = self._progress.executor(self.fail)
        return lane

    def submit(self, lane: SerialExecutor, task: Task, operation: Operation) -> Pending | None:
        """Carry out ``task`` for ``operation``, behind those under way."""
        try:
            return lane.submit(
                task, lambda: operation.deadline, operation.background, operation.ended
            )
        except GroupAbortedError:
            if isinstance(task, Collective):
                task.check_divergence()
            raise
        except CoordinatorError:
            raise
        except BaseException as error:
            # The steps refuse a plan if the one before was given up, and the group with it.
            if isinstance(error, RuntimeError):
                lane.board.check(task.operation)
            # Interrupted midway: this rank is out of step for good.
            lane.board.abort(error)
            raise
