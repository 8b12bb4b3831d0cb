"""The ranks that were started together, before they are divided into groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.bootstrap import DEFAULT_TIMEOUT, Launch, meet
from coordinator.group import GroupCoordinator
from coordinator.link import OPERATION_TIMEOUT, Settings, alone, connect
from coordinator.nodes import find_nodes, lone_node
from coordinator.torch_groups import SocketChoice
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from torch.distributed.distributed_c10d import Store

    from coordinator.exchange import Exchange
    from coordinator.nodes import Nodes
    from shm_broadcast import Board


@dataclass(frozen=True)
class Topology:
    """What all groups of ranks that were started together are built from.

    Attributes:
        rank: this process's global rank.
        world_size: how many ranks.
        settings: what the groups have in common.
        nodes: which ranks share a host, and this host's board; None for a world of one
            without a board.
        exchange: swaps values between all ranks; None for a world of one.
    """

    rank: int
    world_size: int
    settings: Settings
    nodes: Nodes | None
    exchange: Exchange | None

    @classmethod
    def meet(
        cls,
        launch: Launch,
        closing: ExitStack,
        *,
        store: Store | None = None,
        board: Board | None = None,
        backend: str | None = None,
        timeout: float | Deadline | None = DEFAULT_TIMEOUT,
        operation_timeout: float | None = OPERATION_TIMEOUT,
        torch_only: bool = False,
        checked: bool = False,
    ) -> Topology:
        """Wait for all ranks and find out which share a host.

        Args:
            launch: who this process is, and where to meet.
            closing: a board that is made here is closed with it.
            store: meet in this one instead.
            board: this node's, made by a launcher, whose member i is rank i.
            backend: None: NCCL where there is a GPU, gloo elsewhere.
            timeout: seconds for all set-up; None: for ever.
            operation_timeout: seconds that an operation may take; None: for ever.
            torch_only: move tensors by torch's process groups, though there may be better.
            checked: compare what members issue, where the communicator does not by itself.

        Collective: yes, every rank.

        Raises:
            GroupTimeoutError: some ranks did not come in time; names them.
        """
        sockets = None
        if launch.world_size > 1:
            meeting = meet(launch, store, timeout)
            sockets = SocketChoice(launch.interface, meeting.address)
        settings = Settings.of(
            backend,
            launch.local_rank,
            sockets,
            operation_timeout,
            torch_only=torch_only,
            checked=checked,
        )
        if launch.world_size == 1:
            return cls(0, 1, settings, None if board is None else lone_node(board), None)
        nodes = find_nodes(meeting.exchange, board)
        if board is None:
            closing.callback(nodes.board.close)
        closing.callback(nodes.progress.close)
        return cls(launch.rank, launch.world_size, settings, nodes, meeting.exchange)

    def group(
        self, name: str, ranks: Sequence[int], timeout: float | Deadline | None = DEFAULT_TIMEOUT
    ) -> GroupCoordinator:
        """Build the group of these global ranks, this process's among them.

        Collective: yes, these ranks.

        Raises:
            GroupTimeoutError: some of them did not come in time; names them.
        """
        nodes = self.nodes and self.nodes.sub(ranks)
        if self.exchange is None or len(ranks) == 1:
            link = alone(name, self.rank, self.settings, nodes)
        else:
            exchange = self.exchange.sub(name, ranks, Deadline.after(timeout))
            link = connect(exchange, ranks, self.settings, nodes)
        return GroupCoordinator.from_link(link)
