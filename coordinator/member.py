"""Implement one member of a group: who the members are, its node, its end, and `explain`.

    nodes {0, 1}, {2, 3}:    intra [0 1] [2 3]    inter [0 2]

``inter`` has the first member of each node. If the network between nodes is the bottleneck, an
all-reduce in three steps sends each tensor over it only once per node: reduce within the node,
all-reduce between nodes, broadcast within the node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from coordinator import call_counts as begun
from coordinator import compile_ops
from coordinator.messages.messenger import Messenger
from device_comm import ReduceOp, check_reduction
from device_comm.verbs.checks import Timeout, check_out
from shm_broadcast import Board, GroupClosedError, MemberStatus
from shm_broadcast.errors import counted
from shm_broadcast.process import call_in_forked_children

if TYPE_CHECKING:
    from coordinator.context import GroupContext
    from device_comm import Communicator
    from device_comm.backend import Explanation
    from shm_broadcast import MessageQueue


_QUICKER = "all members share a host: shared memory is quicker than sockets"


def explain(link: GroupContext) -> Explanation:
    """The backends that a group uses, with reasons, and those it does not. Collective: no."""
    told = link.device.explain()
    refused = dict(told.unavailable)
    if len(link.ranks) == 1:
        why = "a group of one: every verb is the identity"
    elif link.settings.torch_only:
        why = "told to use torch's process groups"
        refused["ipc" if link.device.device.type == "cuda" else "shm"] = why
    elif link.device.device.type == "cuda":
        why = ""
    elif link.device.capabilities.backend == "shm":
        why, refused["gloo"] = "all members share a host", _QUICKER
    else:
        hosts = 0 if link.nodes is None else len(link.nodes.all())
        why = refused["shm"] = f"the members are on {hosts} hosts"
    choices = tuple(replace(each, reason=each.reason or why) for each in told.choices)
    members = counted(len(link.ranks), "member")
    title = f"{link.name}: {members} on {link.device.device.type}"
    return replace(told, group=title, choices=choices, unavailable=tuple(refused.items()))


LINGER = 5.0
"""Seconds that messages have to arrive when their sender closes the group."""


@dataclass(slots=True)
class _SharedState:
    """What all names of a group share."""

    closed: bool = False


class Member:
    """One process in a group.

    Attributes:
        name: the group's.
        rank: this process's global rank.
        ranks: the members' global ranks, by rank in the group.
        rank_in_group: this member's rank.
        world_size: how many members.
        local_rank: this process's number on its node.
        device: where the tensors of the collectives are.
        device_communicator: what moves them.
        unique_name: the name with a number, as no other group of this process has it.
        mq_broadcaster: the queue for what rank 0 broadcasts by `broadcast_object`; may be None.
    """

    @classmethod
    def from_context(cls, link: GroupContext) -> Self:
        """The group that ``link`` is a member's end of, which it then owns. Collective: no."""
        group = cls.__new__(cls)
        group._init_from(link)
        return group

    def _init_from(self, link: GroupContext) -> None:
        """Become the member whose end of the group ``link`` is."""
        self._context = link
        self.name = link.name
        self.ranks = list(link.ranks)
        self.rank_in_group = link.rank_in_group
        self.rank = link.ranks[link.rank_in_group]
        self.world_size = len(link.ranks)
        self.local_rank = link.settings.local_rank
        self.device: torch.device = link.device.device
        self.device_communicator: Communicator = link.device
        self.mq_broadcaster: MessageQueue | None = None
        self._messenger = Messenger(link.cpu, link.device, link.wire)
        self._counted = self._count() if self.world_size > 1 and link.wire.in_calls else []
        self.unique_name = compile_ops.register_ops(self)
        self._life = _SharedState()
        call_in_forked_children(self)
        one_of_many = self.world_size > 1 and self.name != "world" and "." not in self.name
        if link.nodes is not None and one_of_many:
            link.nodes.board.publish_place(link.name, link.rank_in_group)
        if link.nodes is not None and self.world_size > 1:
            board = link.nodes.board
            for name in dict.fromkeys((link.cpu.name, link.device.name)):
                board.add_group(name, self.rank_in_group, self.ranks)
                link.closing.callback(board.close_group, name, self.rank_in_group, self.ranks)

    def _count(self) -> list[begun.Entry]:
        """Have what this member begins counted."""
        cpu, device = self._context.cpu, self._context.device
        entries = [begun.enter(self.name, self.ranks, device.begun)]
        if cpu is not device:
            entries.append(begun.enter(f"{self.name} cpu", self.ranks, cpu.begun))
        return entries

    # --- who is who ----------------------------------------------------------------------

    @property
    def first_rank(self) -> int:
        """The global rank of the first member."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The global rank of the last member."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first member."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the last member."""
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """The global rank of the next member; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """The global rank of the previous member; before the first comes the last."""
        return self.ranks[self.rank_in_group - 1]

    # --- for torch ------------------------------------------------------------------------

    @property
    def cpu_group(self) -> ProcessGroup:
        """A torch process group of the members, on the CPU; destroyed when this group is closed.

        On one host it is made when it is first asked for, and connects two members when they first
        use it: until then torch opens no socket. Collective: no.

        Raises:
            GroupClosedError: this group is closed.
        """
        return self._open_context().groups.cpu()

    @property
    def device_group(self) -> ProcessGroup:
        """As `cpu_group`, for `device`; the same if that is the CPU. Collective: no."""
        return self._open_context().groups.device()

    def _open_context(self) -> GroupContext:
        if self.closed:
            raise GroupClosedError(f"{self.name} is closed")
        return self._context

    # --- life ----------------------------------------------------------------------------

    @property
    def board(self) -> Board | None:
        """This node's board, on which the members' doings stand; None in a group of one."""
        return None if self._context.nodes is None else self._context.nodes.board

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks in the group of each node's members."""
        return [[0]] if self._context.nodes is None else self._context.nodes.all()

    def status(self) -> list[MemberStatus]:
        """What each member was last seen doing, by rank in the group; ``rank`` is the global one.

        Collective: no.
        """
        if self._context.nodes is None:
            return []
        members = self._context.nodes.members
        return [self._context.nodes.board.member_status(member) for member in members]

    def explain(self) -> Explanation:
        """What carries out each verb, by size, and why not what else could; print it.

        Collective: no.
        """
        return explain(self._context)

    def check(self) -> None:
        """Raise if the group is over, or an operation failed that the device did meanwhile.

        For replayed CUDA graphs, in which nothing can raise: their collectives end at once when
        the group is over, with NaN for results. So call this in each step, after the device has
        done it and before its results are used. It never waits for the device, and reads a few
        words. Collective: no.

        Raises:
            CoordinatorError: what has happened; the group is aborted with it.
        """
        self._open_context().device.check()

    def abort(self, error: BaseException | str) -> None:
        """Make every waiting and every later call raise `GroupAbortedError`. Collective: no.

        It reaches all that share this node's board: with a launcher's board, all groups.
        """
        self._context.device.abort(error)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life.closed

    def after_fork_in_child(self) -> None:
        """In a forked child: closing it does nothing."""
        self._life.closed = True

    def close(self, linger: float = LINGER) -> None:
        """Give everything back; the second time does nothing. Collective: no.

        Other members may go on among themselves only with what does not need this one: those that
        do get GroupClosedError. What this one has done before is there for them still, except for
        messages that nobody has received within ``linger``.

        Args:
            linger: seconds that messages and collectives under way have, unless the group is over.
        """
        self._end(linger, None)

    def _end(self, linger: float, error: BaseException | None) -> None:
        """Close the group; ``error`` is what this member leaves for."""
        if self.closed:
            return
        self._context.abort_on_error(error)  # before they miss anything else
        self._messenger.flush(linger)
        self._life.closed = True
        compile_ops.unregister(self.unique_name)
        for entry in self._counted:
            entry.close()
        self._context.closing.close()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(LINGER if error is None else 0.0, error)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The group itself: a copy of a module that holds it communicates over the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"group {self.name!r} cannot be pickled: it is this process's end of it; leave it out, "
            "or have the receiver use its own"
        )

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<GroupCoordinator {self.name!r} rank {self.rank_in_group} of {self.ranks} "
            f"on {self.device}{state}>"
        )


G_co = TypeVar("G_co", bound="Member", covariant=True)


@dataclass(frozen=True, slots=True)
class Hierarchy(Generic[G_co]):
    """The groups that one member of ``world`` is in.

    Attributes:
        world: the whole group.
        intra: its members on this node; ``world`` itself where there is one node.
        inter: the first member of each node; None on the others.
    """

    world: G_co
    intra: G_co
    inter: G_co | None

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Reduce ``x`` over the world, in three steps. Collective: yes, every member.

        An average is a sum, divided once: right for nodes of different sizes too. That of half
        types is summed in float32 and rounded once. The result is bitwise identical on all members.

        Returns:
            ``out``, or a tensor like ``x``; ``x`` itself in a group of one.

        Raises:
            TypeError: ``op`` is not for this dtype, or ``out`` has another one.
            ValueError: ``out`` has another shape or device.
        """
        world, intra = self.world.device_communicator, self.intra.device_communicator
        if self.intra is self.world:
            return world.all_reduce(x, op=op, out=out, timeout=timeout)
        check_reduction(op, x.dtype)
        if out is not None:
            check_out(out, x.shape, x.dtype, world.device)
        inner, wide = op, x
        if op is ReduceOp.AVG:
            inner = ReduceOp.SUM
            wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        total = intra.reduce(wide, op=inner, timeout=timeout)
        if self.inter is not None and total is not None:
            between = self.inter.device_communicator
            total = between.all_reduce(total, op=inner, timeout=timeout)
            if op is ReduceOp.AVG:
                total = (total / self.world.world_size).to(x.dtype)
        result = intra.broadcast(x if total is None else total, timeout=timeout)
        if out is None:
            return result
        out.detach().copy_(result)
        return out
