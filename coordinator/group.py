"""`GroupCoordinator`: the processes of one group, as one of them sees the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from coordinator import torch_groups
from coordinator.bootstrap import DEFAULT_TIMEOUT
from coordinator.exchange import Exchange
from coordinator.link import Link, Settings, alone, connect
from coordinator.message_verbs import MessageVerbs
from coordinator.tensor_mail import TensorMail
from shm_broadcast import Deadline, MessageQueue, QueueHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from coordinator.verbs import Timeout
    from device_comm import DeviceCommunicator, Work
    from shm_broadcast import Board, MemberStatus


class GroupCoordinator(MessageVerbs):
    """One member's end of a named group: collectives, messages, and who is in it.

    Ranks in arguments are ranks in the group; `rank`, `ranks`, `first_rank`, `last_rank`,
    `next_rank` and `prev_rank` are global. One thread at a time. Errors and waiting are those
    of `shm_broadcast.errors`: nothing waits longer than the group's timeout, or after a
    member has died or aborted.

    Attributes:
        name: the group's.
        rank: this process's global rank.
        ranks: the members' global ranks, by rank in the group.
        rank_in_group: this member's rank.
        world_size: how many members.
        local_rank: this process's number on its node.
        device: where the tensors of the collectives are.
        device_communicator: what moves them.
        cpu_group: a torch process group on the CPU; None in a group of one.
        device_group: one for ``device``, the same if that is the CPU; None in a group of one.
        mq_broadcaster: the queue for what rank 0 broadcasts by `broadcast_object`; may be None.
    """

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str | None,
        use_device_communicator: bool,  # noqa: ARG002 - torch's groups are all there is so far
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        """Build the group this process is in, over torch's default process group.

        Args:
            group_ranks: global ranks of all groups of this kind; this process is in one.
            local_rank: its number on its node.
            torch_distributed_backend: ``"gloo"``, ``"nccl"``; None: what fits this machine.
            use_device_communicator: False: move tensors by the torch process group only.
            use_message_queue_broadcaster: have a queue for the objects that rank 0 broadcasts.
            group_name: for errors and status; with ``group_ranks`` it names the group.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every member of this process's group; other groups are built by
        their own members, and cost nothing here.

        Raises:
            ValueError: this process is in none of the groups or in several.
            RuntimeError: torch has no default process group.
            GroupTimeoutError: some members did not come in time.
        """
        rank = dist.get_rank()
        mine = [ranks for ranks in group_ranks if rank in ranks]
        if len(mine) != 1 or len(set(mine[0])) != len(mine[0]):
            raise ValueError(f"rank {rank} has to be in one group, once; got {group_ranks}")
        name = group_name or "anonymous"
        settings = Settings.of(torch_distributed_backend, local_rank)
        if len(mine[0]) == 1:
            self._adopt(alone(name, rank, settings))
            return
        exchange = Exchange.visit(
            torch_groups.default_store(),
            f"{name}:{'.'.join(map(str, mine[0]))}",
            mine[0].index(rank),
            len(mine[0]),
            name,
            Deadline.after(timeout),
        )
        self._adopt(connect(exchange, mine[0], settings))
        if use_message_queue_broadcaster:
            self.mq_broadcaster = self.create_mq_broadcaster()

    @classmethod
    def from_link(cls, link: Link) -> Self:
        """The group that ``link`` is a member's end of, which it then owns. Collective: no."""
        group = cls.__new__(cls)
        group._adopt(link)
        return group

    def _adopt(self, link: Link) -> None:
        self._link = link
        self.name = link.name
        self.ranks = list(link.ranks)
        self.rank_in_group = link.rank_in_group
        self.rank = link.ranks[link.rank_in_group]
        self.world_size = len(link.ranks)
        self.local_rank = link.settings.local_rank
        self.device: torch.device = link.device.device
        self.device_communicator: DeviceCommunicator = link.device
        self.cpu_group: ProcessGroup | None = link.cpu_group
        self.device_group: ProcessGroup | None = link.device_group
        self.mq_broadcaster: MessageQueue | None = None
        self._mail = TensorMail(link.cpu, link.device)
        self._closed = False

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

    # --- together ------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work[None] | None:
        """Return once every member has come here, on the CPU. Collective: yes, every member."""
        return self._link.cpu.barrier(async_op=async_op, timeout=timeout)

    def create_mq_broadcaster(self, writer_rank: int = 0) -> MessageQueue | None:
        """A new queue from one member to all others, over shared memory.

        Args:
            writer_rank: the rank in the group of the member that writes.

        Returns:
            The queue, to be shut down by the caller; None in a group of one or of several hosts.

        Collective: yes, every member.
        """
        nodes = self._link.nodes
        if nodes is None or self.world_size == 1 or len(nodes.all()) > 1:
            return None
        writer = nodes.members[writer_rank]
        readers = [member for member in nodes.members if member != writer]
        if self.rank_in_group != writer_rank:
            handle: QueueHandle = self._mail.broadcast_object(None, writer_rank, None)
            queue = MessageQueue.attach(handle, nodes.board)
        else:
            queue = MessageQueue.on_board(nodes.board, writer, readers)
            self._mail.broadcast_object(queue.export_handle(), writer_rank, None)
        self.barrier()
        return queue

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
        """What each member on this node was last seen doing, by its number on the board.

        Collective: no.
        """
        if self._link.nodes is None:
            return []
        members = self._link.nodes.members
        return [self._link.nodes.board.member_status(member) for member in members]

    def abort(self, error: BaseException | str) -> None:
        """Make every waiting and every later call raise `GroupAbortedError`. Collective: no.

        It reaches all that share this node's board: with a launcher's board, all groups.
        """
        self._link.device.abort(error)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give everything back; the second time does nothing. Collective: no.

        Other members may go on among themselves only with what does not need this one.
        """
        if self._closed:
            return
        self._closed = True
        if self.mq_broadcaster is not None:
            self.mq_broadcaster.shutdown()
        self._link.closing.close()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<GroupCoordinator {self.name!r} rank {self.rank_in_group} of {self.ranks} "
            f"on {self.device}{state}>"
        )
