"""Collectives and messages between ranks of one host, through shared memory.

Every group has one segment, with two slots for each rank, through which all collectives go in
steps: `device_comm.shm.layout` draws it and states the protocol. Reductions are in rank order, so
all ranks hold the same bits. Messages between two ranks go through a ring of their own, and what
nobody has received yet through memory of its own (`device_comm.shm.mail`). Nothing goes through a
socket.

Memory: for n ranks ``2 n (slot + 64) + 64 n (n + 1)`` bytes, in whole pages, where the slot is 128
KiB, or less where n is more than 16: 0.5 MiB for two ranks, 1 MiB for four, never more than 4 MiB
but for headers. Each ordered pair of ranks that exchanges messages adds a box of 256 KiB and a
page. Messages that do not fit one take what they need while they wait to be received; each rank
keeps at most 4 MiB of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from device_comm.base import Call, Capabilities
from device_comm.reduce_op import ReduceOp
from device_comm.shm import layout
from device_comm.shm.collective import Agreement, Collective
from device_comm.shm.direct import DirectVerbs
from device_comm.shm.layout import GroupLayout
from device_comm.shm.mail import Mail
from device_comm.shm.mailbox import PythonMover
from device_comm.shm.plan import Plan, Planner
from device_comm.shm.planned import PlannedVerbs
from device_comm.shm.python_steps import PythonSteps
from device_comm.shm.results import Results
from device_comm.shm.signature import VERBS
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupAbortedError
from shm_broadcast.progress import Progress
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from torch import Tensor

    from device_comm._native import Comm
    from device_comm.choice import Explanation
    from device_comm.shm.mailbox import Mover
    from device_comm.shm.steps import Steps
    from device_comm.work import Pending
    from shm_broadcast.board import Board
    from shm_broadcast.progress import Lane, Task

    Share = Callable[[bytes | None], bytes]

native: ModuleType | None
try:
    from device_comm import _native as native
except ImportError:
    native = None


class ShmComm(DirectVerbs, PlannedVerbs):
    """One rank's end of a group on one host. One thread at a time. Use `create`.

    Ranks that issue different operations get `DivergenceError` before data is used; one that has
    nothing to wait for, such as a second root, learns of it by its next call. Asynchronous
    operations go on while the caller is busy, on the thread of a `Progress`. Ranks in errors about
    lost and late processes are the board's members.
    """

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        segment: Segment,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        progress: Progress | None = None,
        use_native: bool = True,
    ) -> None:
        """Use `create`, which makes the segment and says what the arguments are."""
        rank, size = _rank_of(board, members), len(members)
        super().__init__(
            rank=rank,
            world_size=size,
            device="cpu",
            capabilities=Capabilities(
                "shm", detects_divergence=True, detects_loss=True, sends_ahead=True, overlaps=False
            ),
            name=name,
            timeout=timeout,
            watch=board,
            members=members,
        )
        self.board = board
        self._segment = segment
        self._layout = GroupLayout.read(segment.words)
        self._results = Results()
        self._planner = Planner(rank, size)
        self._agreement = Agreement(self._planner, rank, size)
        self._mail = Mail(board, self.members, rank, segment, self._layout, self._make_mover)
        self._progress = progress or Progress(board, f"{name} progress")
        self._owns_progress = progress is None
        self._lane = self._progress.lane(self._fail)
        self._mail_lanes: dict[tuple[str, int], Lane] = {}
        self._direct = self._make_native() if use_native and size > 1 else None
        self._steps: Steps = self._direct or PythonSteps(
            segment, self._layout, rank, self._ring_others
        )

    @classmethod
    def create(
        cls,
        board: Board,
        members: Sequence[int],
        share: Share,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        progress: Progress | None = None,
        use_native: bool = True,
    ) -> Self:
        """Set up a group of members of ``board``. Collective: yes, every member.

        Args:
            board: the node's; its abort ends the group, too.
            members: the board's member number of each rank, by rank.
            share: hands bytes from rank 0 to all: rank 0 calls it with them, the others with
                None, and it returns them to all. Called once.
            name: for errors and status, the same on all ranks.
            timeout: seconds for this, and for a call unless it says otherwise; None: for ever.
            progress: drives asynchronous operations; None: one of the communicator's own. Groups
                on one board should share one, which then stays its maker's to close.
            use_native: False: do without the C extension, slowly. Ranks may differ about it.

        Raises:
            ValueError: this process is not one of the members, or they are not distinct.
            GroupTimeoutError: some members did not come; names them.
            SharedMemoryError: too little memory is free, or the members are not on one host.
        """
        group = GroupLayout.for_ranks(len(members))
        if _rank_of(board, members) == 0:
            segment = Segment.create(group.size, "group-collectives")
            group.write(segment.words)
            share(msgspec.msgpack.encode(segment.handle()))
        else:
            segment = Segment.attach(msgspec.msgpack.decode(share(None), type=SegmentHandle))
        comm = cls(
            board,
            members,
            segment,
            name=name,
            timeout=timeout,
            progress=progress,
            use_native=use_native,
        )
        comm._join()
        return comm

    @property
    def uses_native(self) -> bool:
        """Whether the C extension does the work."""
        return self._direct is not None

    def explain(self) -> Explanation:
        """As every communicator's; says so if the C extension is missing. Collective: no."""
        told = super().explain()
        if self.uses_native or self.world_size == 1:
            return told
        why = "it was not built, or is not wanted: small calls take several times as long"
        return replace(told, refused=(*told.refused, ("the C extension", why)))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the group's segment; boxes and parcels of messages come on top."""
        return self._segment.size

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once all that was sent ahead of its receivers has arrived. Collective: no."""
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        self.board.wait(
            lambda: not self._mail.undelivered(),
            deadline,
            f"{self.name} flush",
            lambda: [self.members[rank] for rank in self._mail.undelivered()],
        )

    # --- collectives ---------------------------------------------------------------------

    def _collect(
        self, call: Call, plans: Plan | Iterator[Plan], *keep: Tensor | None
    ) -> Pending | None:
        """Carry out one collective, behind those under way."""
        following = iter((plans,)) if isinstance(plans, Plan) else plans
        task = Collective(self._steps, self.members, call.operation, following, keep)
        return self._perform(self._lane, task, call)

    # --- messages ------------------------------------------------------------------------

    def goes_ahead(self, dst: int, size: int) -> bool:
        """As `PointToPointVerbs.goes_ahead`. Collective: no."""
        lane = self._mail_lanes.get(("send", dst))
        return (lane is None or not lane.busy) and self._mail.goes_ahead(dst, size)

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        task = self._mail.sending(source, peer, call.operation)
        return self._perform(self._mail_lane("send", peer), task, call)

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        task = self._mail.receiving(output, peer, call.operation)
        return self._perform(self._mail_lane("recv", peer), task, call)

    def _short_message(
        self, verb: str, x: Tensor, peer: int, timeout: float | Deadline | None
    ) -> Any:
        # True and 1.0 would be found for 1.
        lane = self._mail_lanes.get((verb, peer)) if type(peer) is int else None
        if lane is None or lane.busy or (direct := self._directly(timeout)) is None:
            return NotImplemented
        sends, mail = verb == "send", self._mail
        if sends:
            moved = direct.send(x, mail.outbox(peer).mover)
        else:
            moved = direct.recv(x, mail.inbox(peer).mover)
        if type(moved) is not int:
            return moved
        begun = mail.sending if sends else mail.receiving
        return self._run(
            verb,
            lambda call: self._perform(lane, begun(x, peer, call.operation, moved), call),
            None,
            timeout=timeout,
        )

    def _mail_lane(self, direction: str, peer: int) -> Lane:
        lane = self._mail_lanes.get((direction, peer))
        if lane is None:
            lane = self._mail_lanes[direction, peer] = self._progress.lane(self._fail)
        return lane

    # --- running -------------------------------------------------------------------------

    def _perform(self, lane: Lane, task: Task, call: Call) -> Pending | None:
        try:
            return lane.perform(task, lambda: call.deadline, call.background)
        except GroupAbortedError:
            if isinstance(task, Collective):
                task.check_divergence()
            raise
        except CoordinatorError:
            raise
        except BaseException as error:
            # Interrupted midway: this rank is out of step for good.
            self.abort(error)
            raise

    def _short_way(self, timeout: float | Deadline | None) -> Comm | None:
        return None if self._lane.busy else self._directly(timeout)

    def _directly(self, timeout: float | Deadline | None) -> Comm | None:
        plain = timeout is None or isinstance(timeout, Deadline)  # a number might be no duration
        return self._direct if plain else None

    def _finish(self, direct: Comm, verb: str, timeout: float | Deadline | None) -> Any:
        operation = self._operations[verb]
        task = Collective(direct, self.members, operation, iter(()), begun=True)
        call = Call(verb, operation, self.timeout if timeout is None else timeout, False)
        try:
            self._perform(self._lane, task, call)
        except CoordinatorError as error:
            self._fail(error)
            raise
        return direct.finish()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `Backend.empty`. Collective: no."""
        return self._results.empty(shape, dtype)

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._results.empty_like(shape, like)

    def _close(self) -> None:
        self._direct = None
        if self._owns_progress:
            self._progress.close()
        self._mail.close()
        self._segment.close()

    # --- setting up ----------------------------------------------------------------------

    def _make_native(self) -> Comm | None:
        if native is None:
            return None
        comm: Comm = native.Comm(
            self._segment.memory,
            self.board.memory,
            self.rank,
            self.board.slot_offset(self.members[self.rank]),
            tuple(self.board.doorbell_offset(member) for member in self.members),
            tuple(self._operations[verb] for verb in (*VERBS, "send", "recv")),
            torch.Tensor,
            ReduceOp,
            self._results.empty_like,
        )
        return comm

    def _make_mover(self, box: Segment, peer: int) -> Mover:
        member = self.members[peer]
        if self._direct is None or native is None:
            return PythonMover(box, lambda: self.board.ring(member))
        mover: Mover = native.Mailbox(
            box.memory, self.board.memory, self.board.doorbell_offset(member)
        )
        return mover

    def _ring_others(self) -> None:
        for peer in self.peers:
            self.board.ring(peer)

    def _join(self) -> None:
        """Say that this rank is there, and wait for the others."""
        words, present = self._segment.words, layout.RANK_PRESENT
        words.store32(self._layout.rank_line(self.rank) + present, 1)
        self._ring_others()

        def absent() -> list[int]:
            return [
                member
                for rank, member in enumerate(self.members)
                if not words.load32(self._layout.rank_line(rank) + present)
            ]

        deadline = Deadline.after(self.timeout)
        self.board.wait(lambda: not absent(), deadline, f"{self.name} create", absent)


def _rank_of(board: Board, members: Sequence[int]) -> int:
    if len(set(members)) != len(members):
        raise ValueError(f"members must be distinct; got {list(members)}")
    if board.member is None or board.member not in members:
        raise ValueError(f"member {board.member} of {board.name} is not one of {list(members)}")
    return list(members).index(board.member)
