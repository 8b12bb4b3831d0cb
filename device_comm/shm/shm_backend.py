"""Run collectives and messages between the ranks of one host through shared memory.

A group has one segment for its collectives (`device_comm.shm.layout`). Reductions are in rank
order, so results are bit-identical on all ranks. Each ordered pair of ranks that exchanges messages
has a channel (`device_comm.shm.channel`). No sockets are used.

Memory: per rank a ring of 2 MiB and two pages, and ``64 n (n + 1)`` bytes for n ranks; above 8
ranks the rings are shorter, 16 MiB in total. A channel has 1 MiB and a page. Messages that do not
fit into it use overflow buffers until they are received; each rank keeps at most 4 MiB of these,
and closes the others at its next large send or flush.
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
from device_comm.operation import ALL_VERBS, Operation, ReduceOp
from device_comm.shm.collectives import Collective, Executors, GroupMembership
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
    from shm_broadcast._native import RecyclingPool


def _recycled(pool: RecyclingPool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in memory of ``pool``."""
    return torch.frombuffer(pool.take(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


_DECODER = msgspec.msgpack.Decoder(SegmentHandle)


class ShmBackend(Backend):
    """One rank's end of a group on one host. One thread at a time. Use `create`.

    Ranks that issue different operations raise `DivergenceError` before data is used; a rank that
    awaits no other, such as a second root, raises it in its next call.
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
        rank, size = _rank_of(board, members), len(members)
        super().__init__(
            Identity.of(rank, size, name=name, timeout=timeout, watch=board, members=members),
            Capabilities(
                "shm",
                ALL_VERBS,
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
        self._pool = new_pool()
        self._in_calls = in_calls
        self._call = numbering(in_calls)
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
            board: the host's board; its abort ends the group, too.
            members: the board's member number of each rank.
            share: broadcasts bytes: rank 0 passes them, the others None, and all get them. Called
                once.
            name: the group's name, for errors and status; the same on all ranks.
            timeout: seconds for `create`, and the default of a call; None: for ever.
            progress: runs asynchronous operations; the caller closes it. Groups on one board should
                share one. None: a `ProgressEngine` of the backend's own.
            in_calls: whether the ranks compare `call_number`; the same on all ranks.

        Raises:
            ValueError: this process is no member, or the members are fewer than 2 or not distinct.
            GroupTimeoutError: members did not join in time; names them.
            PeerLostError: a member has exited, or has closed its end.
            SharedMemoryError: too little memory is free, or the members are not on one host.
            ForeignMemoryError: ``share`` returned a handle that is not rank 0's.
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
        """Run a collective through the group's segment, a message through its channel."""
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
        task = Collective(self._comm, self._membership, operation, self._call())
        return execution.submit(execution.collectives, task, operation)

    def explain(self) -> Explanation:
        """Return the choices; names the unused way of writing payloads."""
        explanation = super().explain()
        unused = _unused_way(*self._comm.way)
        return replace(explanation, unavailable=(*explanation.unavailable, unused))

    def flush(self, deadline: Deadline) -> None:
        """Wait until its collectives are done and its eager sends are received."""
        for handle in tuple(self._execution.collectives.handles):
            handle.wait(deadline)
        self.board.wait(
            lambda: not self._pipes.undelivered(),
            deadline,
            self.identity.operation("flush"),
            lambda: [self.members[rank] for rank in self._pipes.undelivered()],
        )
        self._pipes.overflows.forget()

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """Return True if no send to ``peer`` is pending, and its channel has room."""
        executor = self._execution.messages.get(("send", peer))
        idle = executor is None or not executor.handles
        return idle and self._pipes.sends_eagerly(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Return a contiguous tensor; large ones lie in recycled memory."""
        if math.prod(shape) * dtype.itemsize >= RECYCLED_BYTES:
            return _recycled(self._pool, shape, dtype)
        return super().empty(shape, dtype, like)

    # --- setting up ----------------------------------------------------------------------

    def _make_comm(self) -> Comm:
        pool = self._pool  # without a reference to the backend: no cycle
        return Comm(
            self._segment.memory,
            self.board.memory,
            self.rank,
            self.board.slot_offset(self.members[self.rank]),
            tuple(self.board.eventcount_offset(member) for member in self.members),
            tuple(self.identity.operation(verb) for verb in (*VERBS, "send", "recv")),
            torch.Tensor,
            ReduceOp,
            lambda shape, like: _recycled(pool, shape, like.dtype),
            self.begun.log.memory,
            self.recorder.numbers,
            self.board.history,
            self.name,
            self.world_size > len(GIVEN_CORES),
            self._in_calls,
        )

    def _join(self) -> None:
        membership = self._membership
        membership.join()
        self._closing.callback(membership.mark_left)
        deadline, absent = Deadline.after(self.timeout), membership.not_joined
        self.board.wait(lambda: not absent(), deadline, f"{self.name} create", absent)
        self._segment.prefault()


def _unused_way(past: bool, plain_cost: int, past_cost: int) -> tuple[str, str]:
    ways = ("writing through the caches", "writing past the caches")
    if not (plain_cost and past_cost):
        shared = "not all" if past else "all"
        why = f"not measured yet; Linux reports that {shared} cores share their last-level cache"
        return ways[not past], why
    taken, other = (past_cost, plain_cost) if past else (plain_cost, past_cost)
    return ways[not past], f"takes {other / taken:.1f} times as long between these ranks, measured"


def _rank_of(board: Board, members: Sequence[int]) -> int:
    if len(set(members)) != len(members):
        raise ValueError(f"members must be distinct; got {list(members)}")
    if board.member is None or board.member not in members:
        raise ValueError(f"member {board.member} of {board.name} is not one of {list(members)}")
    return list(members).index(board.member)
