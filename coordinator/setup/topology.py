"""All ranks of a job, before they are divided into groups."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coordinator.group import GroupCoordinator, own_group
from coordinator.hosts.nodes import TellingWhy, find_nodes, known_nodes
from coordinator.setup.bootstrap import DEFAULT_TIMEOUT, meet
from coordinator.setup.link import alone, connect
from coordinator.setup.torch_groups import SocketChoice
from coordinator.stores.authenticated import authenticated
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager, ExitStack

    from torch.distributed.distributed_c10d import Store

    from coordinator.hosts.nodes import Nodes
    from coordinator.setup.exchange import Exchange
    from coordinator.setup.launcher import Launch
    from coordinator.setup.settings import Settings
    from shm_broadcast import Board


@dataclass(frozen=True)
class Topology:
    """What the groups of a job are built from.

    Attributes:
        rank: this process's global rank.
        world_size: the number of ranks.
        settings: the settings of all groups.
        nodes: which ranks share a host, and this host's board; None for a world of one without a
            board.
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
        settings: Settings,
        closing: ExitStack,
        *,
        store: Store | None = None,
        board: Board | None = None,
        node_of: Sequence[int] | None = None,
        timeout: float | Deadline | None = DEFAULT_TIMEOUT,
        sizes: Mapping[str, object] = {},
    ) -> Topology:
        """Wait for all ranks and find out which share a host.

        Args:
            launch: this process's rank, and where to meet.
            settings: of all groups; where gloo listens is found out.
            closing: closes what is made here.
            store: a store to meet in instead.
            board: this node's board, if a launcher made it: member i is rank i.
            node_of: for each rank the first rank on its node, if the launcher that made the boards
                knows; None: the ranks find out.
            timeout: seconds for all set-up; None: for ever.
            sizes: what else all ranks have to be given alike, by name.

        Collective: yes, every rank.

        Raises:
            ValueError, SecretError: the ranks were given different things; names them.
            GroupTimeoutError: some ranks did not come in time; names them.
        """
        if launch.world_size == 1:
            nodes = None if board is None else known_nodes(board, (0,), (board.member or 0,))
            return cls(0, 1, settings, nodes, None)
        terms = {name: str(size) for name, size in sizes.items()} | settings.terms()
        exchange, address = meet(launch, store, timeout, terms, board)
        with exchange.setting_up():
            exchange = authenticated(exchange, launch.secret, closing, address)
            if board is None or node_of is None:
                nodes = find_nodes(exchange, board, address)
            else:
                nodes = known_nodes(board, node_of)
        closing.callback(nodes.close)
        address = address or ("127.0.0.1" if len(nodes.all()) == 1 else "")
        settings = replace(settings, sockets=SocketChoice(launch.interface, address))
        return cls(launch.rank, launch.world_size, settings, nodes, exchange)

    def telling_why(self) -> AbstractContextManager[None]:
        """For set-up behind which this rank leaves if it fails: the others are told why."""
        return nullcontext() if self.nodes is None else TellingWhy(self.nodes.board)

    def group(
        self, name: str, ranks: Sequence[int], timeout: float | Deadline | None = DEFAULT_TIMEOUT
    ) -> GroupCoordinator:
        """Build the group of these global ranks, this process's among them.

        Args:
            name: the group's name.
            ranks: the members' global ranks, by rank in the group.
            timeout: seconds for the group's set-up; None: for ever.

        Collective: yes, these ranks.

        Raises:
            GroupTimeoutError: some of them did not come in time; names them.
            ValueError: this process is not among them, one is there twice, or one is not in the
                world.
        """
        own_group([ranks], self.rank, self.world_size)
        nodes = self.nodes and self.nodes.sub(ranks)
        if self.exchange is None or len(ranks) == 1:
            link = alone(name, self.rank, self.settings, nodes)
        else:
            exchange = self.exchange.sub(name, ranks, Deadline.after(timeout))
            link = connect(exchange, ranks, self.settings, nodes)
        return GroupCoordinator.from_link(link)
