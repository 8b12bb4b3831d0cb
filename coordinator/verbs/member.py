"""What a member knows of its group: who its members are, who is alive, and when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

from coordinator import begun_in_call as begun
from coordinator.compiling import compile_ops
from coordinator.explain import explain
from coordinator.messages.messenger import Messenger
from shm_broadcast import GroupClosedError
from shm_broadcast.machine.forked_child import disown_in_children

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from coordinator.setup.link import Link
    from device_comm import Communicator
    from device_comm.choice import Explanation
    from shm_broadcast import Board, MemberStatus, MessageQueue

LINGER = 5.0
"""Seconds that messages have to arrive when their sender closes the group."""


@dataclass(slots=True)
class _Life:
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
    def from_link(cls, link: Link) -> Self:
        """The group that ``link`` is a member's end of, which it then owns. Collective: no."""
        group = cls.__new__(cls)
        group._adopt(link)
        return group

    def _adopt(self, link: Link) -> None:
        """Become the member whose end of the group ``link`` is."""
        self._link = link
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
        self._life = _Life()
        disown_in_children(self)
        one_of_many = self.world_size > 1 and self.name != "world" and "." not in self.name
        if link.nodes is not None and one_of_many:
            link.nodes.board.add_place(link.name, link.rank_in_group)
        if link.nodes is not None and self.world_size > 1:
            board = link.nodes.board
            for name in dict.fromkeys((link.cpu.name, link.device.name)):
                board.add_group(name, self.rank_in_group, self.ranks)
                link.closing.callback(board.close_group, name, self.rank_in_group, self.ranks)

    def _count(self) -> list[begun.Entry]:
        """Have what this member begins counted."""
        cpu, device = self._link.cpu, self._link.device
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
        return self._open_link().groups.cpu()

    @property
    def device_group(self) -> ProcessGroup:
        """As `cpu_group`, for `device`; the same if that is the CPU. Collective: no."""
        return self._open_link().groups.device()

    def _open_link(self) -> Link:
        if self.closed:
            raise GroupClosedError(f"{self.name} is closed")
        return self._link

    # --- life ----------------------------------------------------------------------------

    @property
    def board(self) -> Board | None:
        """This node's board, on which the members' doings stand; None in a group of one."""
        return None if self._link.nodes is None else self._link.nodes.board

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks in the group of each node's members."""
        return [[0]] if self._link.nodes is None else self._link.nodes.all()

    def status(self) -> list[MemberStatus]:
        """What each member was last seen doing, by rank in the group; ``rank`` is the global one.

        Collective: no.
        """
        if self._link.nodes is None:
            return []
        members = self._link.nodes.members
        return [self._link.nodes.board.member_status(member) for member in members]

    def explain(self) -> Explanation:
        """What carries out each verb, by size, and why not what else could; print it.

        Collective: no.
        """
        return explain(self._link)

    def check(self) -> None:
        """Raise if the group is over, or an operation failed that the device did meanwhile.

        For replayed CUDA graphs, in which nothing can raise: their collectives end at once when
        the group is over, with NaN for results. So call this in each step, after the device has
        done it and before its results are used. It never waits for the device, and reads a few
        words. Collective: no.

        Raises:
            CoordinatorError: what has happened; the group is aborted with it.
        """
        self._open_link().device.check()

    def abort(self, error: BaseException | str) -> None:
        """Make every waiting and every later call raise `GroupAbortedError`. Collective: no.

        It reaches all that share this node's board: with a launcher's board, all groups.
        """
        self._link.device.abort(error)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life.closed

    def disown(self) -> None:
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
        self._link.tell_why(error)  # before they miss anything else
        self._messenger.flush(linger)
        self._life.closed = True
        compile_ops.unregister(self.unique_name)
        for entry in self._counted:
            entry.close()
        self._link.closing.close()

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
