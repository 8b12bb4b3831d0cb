"""Implement a member of a group: its ranks, its host, its life, and `explain`.

    hosts {0, 1}, {2, 3}:    intra [0 1] [2 3]    inter [0 2]

``inter`` has the first member of each host. `Hierarchy.all_reduce` sends each tensor over the
network once per host: reduce within the host, all-reduce between hosts, broadcast within the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from coordinator import call_counts as begun
from coordinator import compile_ops
from coordinator.messages.messenger import Messenger
from device_comm import ReduceOp, check_reduction
from device_comm.operation import AnyOp
from device_comm.verbs.checks import Timeout, check_out
from shm_broadcast import Board, GroupClosedError, MemberStatus
from shm_broadcast.errors import counted
from shm_broadcast.process import call_in_forked_children

if TYPE_CHECKING:
    from coordinator.context import GroupContext
    from device_comm import Communicator
    from device_comm.backend import Explanation
    from shm_broadcast import MessageQueue


_FASTER = "all members share a host: shared memory is faster than sockets"


def explain(link: GroupContext) -> Explanation:
    """Return the backends that a group uses and does not use, with reasons."""
    explanation = link.device.explain()
    refused = dict(explanation.unavailable)
    if len(link.ranks) == 1:
        why = "a group of one: every verb is the identity"
    elif link.settings.torch_only:
        why = "the settings allow torch's process groups only"
        refused["ipc" if link.device.device.type == "cuda" else "shm"] = why
    elif link.device.device.type == "cuda":
        why = ""
    elif link.device.capabilities.backend == "shm":
        why, refused["gloo"] = "all members share a host", _FASTER
    else:
        hosts = 0 if link.nodes is None else len(link.nodes.all())
        why = refused["shm"] = f"the members are on {hosts} hosts"
    choices = tuple(replace(each, reason=each.reason or why) for each in explanation.choices)
    members = counted(len(link.ranks), "member")
    title = f"{link.name}: {members} on {link.device.device.type}"
    return replace(explanation, group=title, choices=choices, unavailable=tuple(refused.items()))


LINGER = 5.0
"""Seconds that `Member.close` waits for messages in flight."""


@dataclass(slots=True)
class _SharedState:
    closed: bool = False


class Member:
    """One process's end of a group.

    Attributes:
        unique_name: the name with a number, unique in this process: ``"tp:0"``.
        mq_broadcaster: the queue for objects that rank 0 broadcasts; None: there is none.
    """

    unique_name = ""
    mq_broadcaster: MessageQueue | None = None

    @classmethod
    def from_context(cls, link: GroupContext) -> Self:
        """Make the group from its context, which the group then owns."""
        group = cls.__new__(cls)
        group._init_from(link)
        return group

    @classmethod
    def sharing(cls, group: Member) -> Self:
        """Return ``group`` as an object of this class; both close together."""
        other = cls.__new__(cls)
        vars(other).update(vars(group))
        return other

    def _init_from(self, link: GroupContext) -> None:
        self._context = link
        self._messenger = Messenger(link.cpu, link.device, link.wire)
        self._counted = self._count() if self.world_size > 1 and link.wire.in_calls else []
        self.unique_name = compile_ops.register_ops(link.name, link.device)
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

    @property
    def device_communicator(self) -> Communicator:
        """The communicator that runs the collectives on ``device``."""
        return self._context.device

    def _count(self) -> list[begun.Entry]:
        cpu, device, token = self._context.cpu, self._context.device, self._context.wire.token
        entries = [begun.enter(self.name, self.ranks, token, device.begun)]
        if cpu is not device:
            entries.append(begun.enter(f"{self.name} cpu", self.ranks, token, cpu.begun))
        return entries

    # --- ranks ---------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """The group's name."""
        return self._context.name

    @cached_property
    def ranks(self) -> list[int]:
        """The members' global ranks, by rank in the group."""
        return list(self._context.ranks)

    @cached_property
    def rank(self) -> int:
        """This process's global rank."""
        return self._context.ranks[self.rank_in_group]

    @cached_property
    def rank_in_group(self) -> int:
        """This member's rank in the group."""
        return self._context.rank_in_group

    @cached_property
    def world_size(self) -> int:
        """The number of members."""
        return len(self._context.ranks)

    @cached_property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return self._context.settings.local_rank

    @cached_property
    def device(self) -> torch.device:
        """The device of the collectives' tensors."""
        return self._context.device.device

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
        """The global rank of the next member; the last member's next is the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """The global rank of the previous member; the first member's previous is the last."""
        return self.ranks[self.rank_in_group - 1]

    # --- for torch ------------------------------------------------------------------------

    @property
    def cpu_group(self) -> ProcessGroup:
        """A torch process group of the members, on the CPU; `close` destroys it.

        On one host the first access makes it, and two members connect at their first operation on
        it; until then torch opens no socket. Raises GroupClosedError if this group is closed.
        A subclass may assign another one, which its owner destroys; the verbs do not use it.
        """
        return vars(self).get("cpu_group") or self._open_context().groups.cpu()

    @cpu_group.setter
    def cpu_group(self, group: ProcessGroup) -> None:
        vars(self)["cpu_group"] = group

    @property
    def device_group(self) -> ProcessGroup:
        """As `cpu_group`, for `device`; the same object if that is the CPU."""
        return vars(self).get("device_group") or self._open_context().groups.device()

    @device_group.setter
    def device_group(self, group: ProcessGroup) -> None:
        vars(self)["device_group"] = group

    def _open_context(self) -> GroupContext:
        if self.closed:
            raise GroupClosedError(f"{self.name} is closed")
        return self._context

    # --- life ----------------------------------------------------------------------------

    @property
    def board(self) -> Board | None:
        """This host's board; None in a group of one."""
        return None if self._context.nodes is None else self._context.nodes.board

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks in the group of each host's members."""
        return [[0]] if self._context.nodes is None else self._context.nodes.all()

    def status(self) -> list[MemberStatus]:
        """Return each member's latest state, by rank in the group; its ``rank`` is global."""
        if self._context.nodes is None:
            return []
        members = self._context.nodes.members
        return [self._context.nodes.board.member_status(member) for member in members]

    def explain(self) -> Explanation:
        """Return the backend of each verb and size, with the reasons; print it."""
        return explain(self._context)

    def check(self) -> None:
        """Raise CoordinatorError if the group is aborted or an operation on the device has failed.

        Replayed CUDA graphs cannot raise: their collectives return NaN once the group is aborted.
        Call this in each step, after the device has run the graph and before the results are used.
        It never waits for the device and reads a few words. A failure aborts the group.
        """
        self._open_context().device.check()

    def abort(self, error: BaseException | str) -> None:
        """Make each waiting and each later call of all members raise `GroupAbortedError`.

        It aborts all groups on this host's board; with a launcher's board, all groups of the job.
        """
        self._context.device.abort(error)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life.closed

    def after_fork_in_child(self) -> None:
        """Mark the group closed in a forked child, without releasing anything."""
        self._life.closed = True

    def close(self, linger: float = LINGER) -> None:
        """Release everything; idempotent.

        The other members may continue; operations that need this member raise `GroupClosedError`.
        Its earlier messages and results stay available, except messages not received within
        ``linger`` seconds.

        Args:
            linger: seconds to wait for messages and collectives in flight, unless the group is
                aborted.
        """
        self._end(linger, None)

    def _end(self, linger: float, error: BaseException | None) -> None:
        if self.closed:
            return
        self._context.abort_on_error(error)  # first: the root cause must precede its effects
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
        """Return the group itself: a copied module communicates over the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"group {self.name!r} cannot be pickled: it is this process's end of the group; leave "
            "it out and use the receiver's own"
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
    """The groups of one member's host and of the hosts.

    Attributes:
        world: the whole group.
        intra: its members on this host; ``world`` itself if there is one host.
        inter: the first member of each host; None on the other members.
    """

    world: G_co
    intra: G_co
    inter: G_co | None

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: AnyOp = ReduceOp.SUM,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Reduce ``x`` over the world, in three steps. Collective: yes, every member.

        ``ReduceOp.AVG`` sums and divides once by the world size, so hosts may differ in size. It
        sums float16 and bfloat16 in float32 and rounds once. The result is bitwise identical on all
        members.

        Returns:
            ``out``, or a new tensor like ``x``; ``x`` itself in a group of one.

        Raises:
            TypeError: ``op`` does not support the dtype, or ``out`` has another dtype.
            ValueError: ``out`` has another shape or device.
        """
        world, intra = self.world._context.device, self.intra._context.device
        if self.intra is self.world:
            return world.all_reduce(x, op=op, out=out, timeout=timeout)
        op = check_reduction(op, x.dtype)
        if out is not None:
            check_out(out, x.shape, x.dtype, world.device)
        inner, wide = op, x
        if op is ReduceOp.AVG:
            inner = ReduceOp.SUM
            wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        total = intra.reduce(wide, op=inner, timeout=timeout)
        if self.inter is not None and total is not None:
            between = self.inter._context.device
            total = between.all_reduce(total, op=inner, timeout=timeout)
            if op is ReduceOp.AVG:
                total = (total / self.world.world_size).to(x.dtype)
        result = intra.broadcast(x if total is None else total, timeout=timeout)
        if out is None:
            return result
        out.detach().copy_(result)
        return out
