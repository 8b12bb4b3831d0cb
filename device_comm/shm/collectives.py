"""Run collectives through shared memory: membership, and execution in order.

A collective runs chunk by chunk through the group's segment (`device_comm.shm.layout`), in the C
extension. A rank that has closed the group stores nothing more; a rank that waits for it checks
once more for stores before the close, then raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from device_comm.operation import Operation
from device_comm.shm.layout import GROUP_LEFT, RANK_PRESENT, GroupLayout
from device_comm.shm.signature import signature_of, signature_text
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
        self.rank = rank
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


class Status(IntEnum):
    """The state of a collective after `Comm.begin` and `Comm.advance`."""

    DONE = 0
    BLOCKED = 1
    DIVERGED = 2


class Collective:
    """One collective in progress; a `shm_broadcast.executor.Task`."""

    def __init__(
        self,
        comm: Comm,
        membership: GroupMembership,
        operation: Operation,
        call: int = 0,
        *,
        begun: bool = False,
    ) -> None:
        """Run ``operation`` on ``comm``, exclusively, in call number ``call``.

        ``begun``: ``comm`` has begun it already.
        """
        self.operation = operation.name
        self._comm = comm
        self._membership = membership
        self._what = operation
        self._call = call
        self._begun = begun

    def advance(self, spin_ns: int) -> bool:
        """Run as far as possible, or for a few MiB; return True at the end.

        Raises:
            DivergenceError: another rank is in another operation.
            GroupClosedError: an awaited rank has closed the group, which is aborted.
        """
        status = self._comm.advance(spin_ns) if self._begun else self._begin(spin_ns)
        if status == Status.BLOCKED and self._membership.anyone_left:
            status = self._advance_without_left_ranks()
        if status == Status.DIVERGED:
            self.check_divergence()
        return status == Status.DONE

    def ready(self) -> bool:
        """Return True if `advance` makes progress or raises."""
        return not self._begun or self._comm.ready() or self._awaits_left_rank()

    def missing(self) -> list[int]:
        """Return the member numbers of the awaited ranks."""
        members = self._membership.members
        return [members[rank] for rank in self._comm.missing()] if self._begun else []

    def check_divergence(self) -> None:
        """Raise `DivergenceError` if a rank has arrived in another operation."""
        divergence = self._comm.divergent() if self._begun else None
        if divergence is None:
            return
        rank, ours, theirs = divergence
        if isinstance(ours, bytes):
            raise DivergenceError(rank, signature_text(ours), signature_text(theirs))
        verb, own = self._what.verb, self._membership.rank
        if verb != "all_to_all":
            raise DivergenceError(rank, f"{verb} of {ours}", f"{verb} of {theirs}")
        raise DivergenceError(
            rank,
            f"all_to_all that receives {ours[rank]} elements from that rank",
            f"all_to_all that sends {theirs[own]} elements to rank {own}",
        )

    def _begin(self, spin_ns: int) -> int:
        what, source, output = self._what, self._what.source, self._what.output
        status = self._comm.begin(
            signature_of(what),
            source.data_ptr(),
            source.nbytes,
            output.data_ptr(),
            output.nbytes,
            source.itemsize,
            what.source_sizes,
            what.output_sizes,
            self._call,
            spin_ns,
        )
        self._begun = True
        return status

    def _awaits_left_rank(self) -> bool:
        membership = self._membership
        return membership.anyone_left and any(map(membership.has_left, self._comm.missing()))

    def _advance_without_left_ranks(self) -> int:
        left = self._membership.left()
        # Once more: their stores that preceded the close are visible now.
        status = self._comm.advance(0)
        if status == Status.BLOCKED:
            for rank in self._comm.missing():
                if rank in left:
                    raise self._membership.abort_left(self.operation, rank)
        return status


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
            # `Comm.begin` raises if the collective before failed: the group's abort is the cause.
            if isinstance(error, RuntimeError):
                executor.board.check(task.operation)
            # An interrupted operation leaves this rank out of step with the others.
            executor.board.abort(error)
            raise
