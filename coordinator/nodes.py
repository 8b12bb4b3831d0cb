"""Which members share a host, and the board that those share.

Members are on one node if they can attach the same board. That is tried, not guessed from
host names, addresses or rank arithmetic: two containers of one machine that cannot see each
other's processes are two nodes here. The machine's boot id serves as a hint only, so that
one round of tries is enough where nothing is isolated.

    round   the first undecided member of each hint creates a board; the other undecided
            members of that hint try to attach it; who can is decided
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shm_broadcast import Board, BoardHandle, SharedMemoryError
from shm_broadcast.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.exchange import Exchange

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a group, and this node's board.

    Attributes:
        board: shared by this node's members. A member may have other slots on it than its rank.
        members: by rank in the group, its slot on the board.
        node_of: by rank in the group, the first rank of its node.
        progress: pushes on what takes place in the background, for all groups on the board.
    """

    board: Board
    members: tuple[int, ...]
    node_of: tuple[int, ...]
    progress: Progress

    def all(self) -> list[list[int]]:
        """The ranks of each node, nodes in the order of their first ranks."""
        return [
            [rank for rank, first in enumerate(self.node_of) if first == node]
            for node in sorted(set(self.node_of))
        ]

    def sub(self, ranks: Sequence[int]) -> Nodes:
        """The nodes of some members, in a group of their own; the board stays the same."""
        first: dict[int, int] = {}
        for index, rank in enumerate(ranks):
            first.setdefault(self.node_of[rank], index)
        return Nodes(
            self.board,
            tuple(self.members[rank] for rank in ranks),
            tuple(first[self.node_of[rank]] for rank in ranks),
            self.progress,
        )


def find_nodes(exchange: Exchange, board: Board | None = None) -> Nodes:
    """Find out who shares a host; every node has a board afterwards.

    Args:
        exchange: swaps values between the members.
        board: the board that a launcher made for this node, whose member i is rank i;
            otherwise one is made.

    Returns:
        The nodes; their progress, and then a board that was made, are the caller's to close.

    Collective: yes, every member; all give a board, or none.

    Raises:
        GroupTimeoutError: a member did not take part in time.
        SharedMemoryError: too little memory is free.
    """
    made = board or _make_board(exchange, exchange.size, exchange.rank)
    # Same segment, same node.
    segments = exchange.all_gather("board", made.handle().segment.nonce)
    node_of = tuple(segments.index(each) for each in segments)
    return Nodes(made, tuple(range(exchange.size)), node_of, Progress(made, "coordinator"))


def lone_node(board: Board) -> Nodes:
    """The nodes of a group of one, whose only member this process is. Collective: no."""
    return Nodes(board, (board.member or 0,), (0,), Progress(board, "coordinator"))


def _make_board(members: Exchange, n_members: int, rank: int) -> Board:
    """The board of this node, found among the undecided ``members``."""
    hints = members.all_gather("host", _BOOT_ID.read_bytes())
    leader = hints.index(hints[members.rank])
    board = Board.create(n_members, rank, members.name) if leader == members.rank else None
    offers = members.all_gather("boards", msgspec.msgpack.encode(board and board.handle()))
    if board is None:
        board = _try_to_attach(offers[leader], rank)
    decided = members.all_gather("decided", b"yes" if board else b"")
    if board is not None:
        return board
    undecided = [each for each, answer in enumerate(decided) if not answer]
    return _make_board(members.sub("undecided", undecided), n_members, rank)


def _try_to_attach(offer: bytes, rank: int) -> Board | None:
    try:
        return Board.attach(msgspec.msgpack.decode(offer, type=BoardHandle), rank)
    except SharedMemoryError:
        return None
