"""Run collectives and messages between the ranks of one host through shared memory.

Every group has one segment, with two slots and a ring for each rank, through which all collectives
go in steps: `device_comm.shm.layout` draws it and states the protocol. Reductions are in rank
order, so all ranks get bit-identical results. Messages between two ranks go through a separate
pipe, and messages that are not received yet through additional memory
(`device_comm.shm.transfers`). No sockets are used.

Memory: a ring of 2 MiB and two pages for each of n ranks, and ``64 n (n + 1)`` bytes; rings are
shorter where n is more than 8, and have 16 MiB together. Each ordered pair of ranks that exchanges
messages adds a pipe of 1 MiB and a page. Messages that do not fit one take what they need while
they wait to be received; each rank keeps at most 4 MiB of that, from its next large send or flush
on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec
import torch
from torch import Tensor

from device_comm._native import Comm
from device_comm.backend import Backend, Capabilities, Explanation, Identity, end_group
from device_comm.call_number import VERBS, numbering
from device_comm.operation import Operation, ReduceOp
from device_comm.shm.collectives import Collective, Executors, GroupMembership, Plans
from device_comm.shm.direct import FastPathCalls
from device_comm.shm.layout import GroupLayout
from device_comm.shm.transfers import PeerPipes, ReceiveTask, SendTask
from shm_broadcast.cpu import GIVEN_CORES
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.executor import ProgressEngine, Task
from shm_broadcast.ring.buffers import RECYCLED_BYTES, new_pool
from shm_broadcast.segment import Segment, SegmentHandle
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from device_comm.work import Pending


class Results:
    """Makes tensors on the CPU.

    The C extension holds it, so it must not hold the backend that holds the extension's end.
    """

    def __init__(self) -> None:
        self._pool = new_pool()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor of ``shape``."""
        size = math.prod(shape) * dtype.itemsize
        if size < RECYCLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._pool.take(size), dtype=dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def empty_like(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """As `empty`, of the dtype of ``like``."""
        return self.empty(shape, like.dtype)


_DECODER = msgspec.msgpack.Decoder(SegmentHandle)


class ShmBackend(Backend):
    """One rank's end of a group on one host. One thread at a time. Use `create`.

    Ranks that issue different operations get `DivergenceError` before data is used; one that has
    nothing to wait for, such as a second root, learns of it by its next call. Asynchronous
    operations go on while the caller is busy, on the thread of a `ProgressEngine`. Ranks in errors
    about lost and late processes are the board's members.
    """

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        segment: Segment,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        progress: ProgressEngine | None = None,
        in_calls: bool = True,
    ) -> None:
        """Use `create`, which makes the segment and says what the arguments are."""
        rank, size = _rank_of(board, members), len(members)
        super().__init__(
            Identity.of(rank, size, name=name, timeout=timeout, watch=board, members=members),
            Capabilities(
                "shm",
                detects_divergence=True,
                detects_loss=True,
                eager_sends=True,
                series=True,
                overlaps=False,
            ),
        )
        self.board = board
        self._segment = segment
        self._closing.callback(segment.close)
        self._layout = GroupLayout.read(segment.words)
        self._results = Results()
        self._in_calls = in_calls
        self._call = numbering(in_calls)
        self._plans: Plans
        self._membership = GroupMembership(board, self.members, rank, segment, self._layout)
        self._pipes = PeerPipes(board, self._membership, rank, segment, self._layout, self._call)
        self._closing.callback(self._pipes.close)
        if progress is None:
            progress = ProgressEngine(board, f"{name} progress")
            self._closing.callback(progress.close)
        self._execution = Executors(progress, partial(end_group, self.identity))
        self._comm = self._make_comm()
        self.fast_path = FastPathCalls(
            self._comm,
            self._membership,
            self._pipes,
            self._execution,
            self.identity,
            self.recorder,
        )

    @classmethod
    def create(
        cls,
        board: Board,
        members: Sequence[int],
        share: Callable[[bytes | None], bytes],
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        progress: ProgressEngine | None = None,
        in_calls: bool = True,
    ) -> Self:
        """Set up a group of members of ``board``. Collective: yes, every member.

        Args:
            board: the node's; its abort ends the group, too.
            members: the board's member number of each rank, by rank.
            share: hands bytes from rank 0 to all: rank 0 calls it with them, the others with
                None, and it returns them to all. Called once.
            name: for errors and status, the same on all ranks.
            timeout: seconds for this, and for a call unless it says otherwise; None: for ever.
            progress: drives asynchronous operations; None: one of its own. Groups
                on one board should share one, which then stays its maker's to close.
            in_calls: whether the ranks compare `call_number`; the same on all of them.

        Raises:
            ValueError: this process is no member, or the members are fewer than 2 or not distinct.
            GroupTimeoutError: some members did not come; names them.
            PeerLostError: one has ended, or left.
            SharedMemoryError: too little memory is free, or the members are not on one host.
            ForeignMemoryError: what ``share`` gave is not rank 0's.
        """
        if len(members) < 2:
            raise ValueError(f"a group in shared memory has 2 members or more; got {list(members)}")
        group = GroupLayout.for_ranks(len(members))
        if _rank_of(board, members) == 0:
            segment = Segment.create(group.size, "group-collectives")
            group.write(segment.words)
            share(msgspec.msgpack.encode(segment.handle()))
        else:
            handle = _DECODER.decode(share(None))
            try:
                segment = Segment.attach(
                    handle, lambda pid: board.is_running(members[0], pid), touch=False
                )
            except SharedMemoryError:
                board.require(f"{name} create", lambda: members[:1], lambda: False)
                raise
        for begin, end in group.written_by(_rank_of(board, members)):
            segment.first_touch(begin, end)
        backend = cls(
            board,
            members,
            segment,
            name=name,
            timeout=timeout,
            progress=progress,
            in_calls=in_calls,
        )
        backend._join()
        return backend

    def start(self, operation: Operation) -> Pending | None:
        """Carry out a collective by its plans, a message through its pipe."""
        execution, name, peer = self._execution, operation.name, operation.peer
        task: Task
        match operation.verb:
            case "send":
                task = SendTask(self._pipes, peer, name, operation.source)
                return execution.submit(execution.message_executor("send", peer), task, operation)
            case "recv":
                tensors = () if operation.following is not None else (operation.output,)
                task = ReceiveTask(self._pipes, peer, name, tensors, operation.following)
                return execution.submit(execution.message_executor("recv", peer), task, operation)
        plans = self._plans.of(operation)
        task = Collective(self._comm, self._membership, name, plans, operation, call=self._call())
        return execution.submit(execution.collectives, task, operation)

    def explain(self) -> Explanation:
        """As every backend's; says how payloads are not written."""
        told = super().explain()
        if self.world_size == 1:
            return told
        return replace(told, unavailable=(*told.unavailable, _other_way(*self._comm.way)))

    def flush(self, deadline: Deadline) -> None:
        """Return once its collectives are done, and all that it sent ahead has arrived."""
        for ticket in tuple(self._execution.collectives.handles):
            ticket.wait(deadline)
        self.board.wait(
            lambda: not self._pipes.undelivered(),
            deadline,
            self.identity.operation("flush"),
            lambda: [self.members[rank] for rank in self._pipes.undelivered()],
        )
        self._pipes.overflows.forget()

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """As every backend's: if nothing to that rank is under way, and there is room."""
        lane = self._execution.messages.get(("send", peer))
        return (lane is None or not lane.handles) and self._pipes.sends_eagerly(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """As every backend's; large ones lie in memory that was used before."""
        return self._results.empty(shape, dtype)

    # --- setting up ----------------------------------------------------------------------

    def _make_comm(self) -> Comm:
        return Comm(
            self._segment.memory,
            self.board.memory,
            self.rank,
            self.board.slot_offset(self.members[self.rank]),
            tuple(self.board.eventcount_offset(member) for member in self.members),
            tuple(self.identity.operation(verb) for verb in (*VERBS, "send", "recv")),
            torch.Tensor,
            ReduceOp,
            self._results.empty_like,
            self.begun.words,
            self.recorder.numbers,
            self.board.history,
            self.name,
            self.world_size > len(GIVEN_CORES),
            self._in_calls,
        )

    def _join(self) -> None:
        """Say that this rank is there, and wait for the others."""
        membership = self._membership
        membership.join()
        self._closing.callback(membership.mark_left)
        deadline, absent = Deadline.after(self.timeout), membership.not_joined
        self.board.wait(lambda: not absent(), deadline, f"{self.name} create", absent)
        self._segment.prefault()
        self._plans = Plans(self.rank, self.world_size, self._layout.whole_bytes)


def _other_way(past: bool, plain_cost: int, past_cost: int) -> tuple[str, str]:
    """The way in which payloads are not written, and why."""
    ways = ("writing through the caches", "writing past the caches")
    if not (plain_cost and past_cost):
        shared = "not all" if past else "all"
        return ways[not past], f"not measured yet; by Linux {shared} cores share their last cache"
    taken, other = (past_cost, plain_cost) if past else (plain_cost, past_cost)
    return ways[not past], f"takes {other / taken:.1f} times as long between these ranks, measured"


def _rank_of(board: Board, members: Sequence[int]) -> int:
    if len(set(members)) != len(members):
        raise ValueError(f"members must be distinct; got {list(members)}")
    if board.member is None or board.member not in members:
        raise ValueError(f"member {board.member} of {board.name} is not one of {list(members)}")
    return list(members).index(board.member)
