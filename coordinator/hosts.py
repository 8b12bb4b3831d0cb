"""Find which members share a host, make a board on each host, and exchange heartbeats between
hosts.

    store      beat/FIRST-MEMBER-OF-THE-HOST: that host's latest `HostHeartbeat`
    thread     every `PERIOD_SECONDS`: reads all beats; writes this host's, if it is old

A topology on one host has no heartbeat. Every process of a host reads the beats. The host's own
beat is written by whichever of its processes finds it too old, so a process that is stopped or dead
does not silence its host. The thread has its own connection to the store: a request that the store
does not answer blocks all later ones on the same connection.

The beats are passed to `RemoteBoards`, except failures, which abort this host's board.

Members are on one node if they can attach the same board. They try it, and do not guess from host
names, addresses or rank arithmetic: two containers of one machine that cannot see each other's
processes are two nodes. The machine's boot id is only a hint about whom to try first; if no
processes are isolated from each other, one round is enough.

    round   among the undecided members with the same hint, the first one creates a board and the
            others try to attach it; those that can, and the first one, are decided
"""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from torch.distributed import FileStore, HashStore, Store

from coordinator.remote_boards import RemoteBoards, encode_heartbeat, number_of
from coordinator.store_client import ProxyStore, behind_prefixes, values_of
from shm_broadcast import (
    Board,
    BoardHandle,
    ForeignMemoryError,
    GroupTimeoutError,
    SharedMemoryError,
)
from shm_broadcast.executor import ProgressEngine

if TYPE_CHECKING:
    from coordinator.rendezvous import Rendezvous


PERIOD_SECONDS: Final = 0.25
"""How often each process reads all beats, and writes its host's if that is due."""

_DUE_SECONDS: Final = 0.2
"""The age of its host's beat at which a process writes a new one; less than the period, so that a
single process on a host writes each time."""

_SWAPPED_WITHIN: Final = 0.5
"""How long a call that reports a failure waits until the other hosts can read it."""

_FAREWELL_SECONDS: Final = 1.0
"""How long `Heartbeat.close` waits for the last beat to be written."""


class Heartbeat:
    """One process's part in the heartbeat. Close it before its board and its store."""

    def __init__(
        self,
        exchange: Rendezvous,
        board: Board,
        hosts: Mapping[str, Sequence[int]],
        here: str,
    ) -> None:
        """Prepare; `send_first` and `start` follow.

        Args:
            exchange: of the members; the beats are in its store.
            board: this host's board.
            hosts: the members of each host, by the host's name.
            here: the name of this host, one of ``hosts``.
        """
        others = {name: members for name, members in hosts.items() if name != here}
        self._store, keeper = exchange.store, exchange.keeper
        self._board = board
        self._members = tuple(hosts[here])
        self._key = _key(self._members)
        self._others = [_key(members) for members in others.values()]
        self._keeps_store = keeper == board.member
        self._wake = threading.Event()
        self._turns = threading.Condition()
        self._wanted = self._done = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self.boards = RemoteBoards(
            board.ranks, others, keeper=keeper, store=exchange.host, swap=self._swap
        )
        board.set_remote_members(self.boards)

    def send_first(self) -> None:
        """Write this host's beat, so that it is in the store before others read it.

        Collective: yes, every member, before any calls `start`.
        """
        self._write(self._store)

    def start(self) -> None:
        """Start the thread. All hosts must have written their first beats.

        Does nothing with a `FileStore`, whose file would grow with every beat, and with a
        `HashStore`, which no other process can read: hosts then hear nothing of each other.
        """
        if not isinstance(behind_prefixes(self._store), (FileStore, HashStore)):
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Write the last beat and end the thread; idempotent. Collective: no.

        On the member that hosts the store it waits a while, so that the others can read the beat.
        """
        self.boards.refresh = _nothing  # as bound, it has the board that has it
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        if thread.is_alive():  # it may not have been started
            thread.join(_FAREWELL_SECONDS)
        if self._keeps_store and not thread.is_alive():
            time.sleep(2 * PERIOD_SECONDS)

    def _swap(self) -> None:
        """Have the thread read all beats and write this host's; wait until both were begun after
        this call, but at most `_SWAPPED_WITHIN`.
        """
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self._turns:
            self._wanted += 1
            mine = self._wanted
            self._wake.set()
            self._turns.wait_for(lambda: self._done >= mine, _SWAPPED_WITHIN)

    def _run(self) -> None:
        try:
            store = _own_connection(self._store)
            while not self._closing:
                with suppress(GroupTimeoutError):
                    self._turn(store)
                self._wake.wait(PERIOD_SECONDS)
                self._wake.clear()
            self._write(store)
        except Exception as error:  # noqa: BLE001 - whatever a store raises when it has gone
            self.boards.store_ended(str(error).partition("\n")[0])
        finally:
            self._end_turn(sys.maxsize)

    def _turn(self, store: Store) -> None:
        """Read all beats, and write this host's if it is due."""
        # Read before the beats: a `_swap` that comes later is served by the next turn.
        wanted = self._wanted
        # If the store is gone, this raises; `get` would print to stderr as well.
        store.check([self._key])
        mine, *others = values_of(store, [self._key, *self._others])
        self.boards.pass_on(others, self._board)
        age = time.monotonic_ns() - number_of(mine)
        if wanted > self._done or age > _DUE_SECONDS * 1e9:
            self._write(store)
        self._end_turn(wanted)

    def _end_turn(self, wanted: int) -> None:
        with self._turns:
            self._done = max(self._done, wanted)
            self._turns.notify_all()

    def _write(self, store: Store) -> None:
        heartbeat = encode_heartbeat(self._board, self._members, time.monotonic_ns())
        store.set(self._key, heartbeat)  # type: ignore[arg-type] # the stub knows text only


def _nothing() -> None:
    pass


def _key(members: Sequence[int]) -> str:
    return f"beat/{members[0]}"


def _own_connection(store: Store) -> Store:
    """A second connection to the same store; an `ProxyStore` has only one, for all threads."""
    if isinstance(behind_prefixes(store), ProxyStore):
        return store
    return store.clone()  # type: ignore[attr-defined,no-any-return]


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_AND_ADDRESS = msgspec.msgpack.Decoder(tuple[str, str])
_BOARD = msgspec.msgpack.Decoder(BoardHandle)


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The nodes of a group, and this node's board.

    Attributes:
        board: the board of this node's members. A member's slot need not be its rank in the group.
        members: each member's slot on the board, by rank in the group.
        node_of: for each rank in the group, the first rank of its node.
        progress: runs background operations, for all groups on the board.
        closing: closes what was made here; a board that was given stays open.
    """

    board: Board
    members: tuple[int, ...]
    node_of: tuple[int, ...]
    progress: ProgressEngine
    closing: ExitStack

    def all(self) -> list[list[int]]:
        """The ranks of each node; the nodes in the order of their first ranks."""
        return [
            [rank for rank, first in enumerate(self.node_of) if first == node]
            for node in sorted(set(self.node_of))
        ]

    def sub(self, ranks: Sequence[int]) -> HostTopology:
        """The nodes of the subgroup of ``ranks``; the board stays the same."""
        first: dict[int, int] = {}
        for index, rank in enumerate(ranks):
            first.setdefault(self.node_of[rank], index)
        return HostTopology(
            self.board,
            tuple(self.members[rank] for rank in ranks),
            tuple(first[self.node_of[rank]] for rank in ranks),
            self.progress,
            self.closing,
        )

    def close(self) -> None:
        """Leave the board and end the heartbeat; idempotent. Collective: no."""
        self.closing.close()


def find_nodes(exchange: Rendezvous, board: Board | None = None, address: str = "") -> HostTopology:
    """Find out which members share a host; with several hosts, start the heartbeat between them.

    Args:
        exchange: swaps values between the members.
        board: this node's board, if a launcher made it: member i is rank i. None: each node makes
            one.
        address: this host's address, to tell hosts of the same name apart.

    Returns:
        The nodes; the caller closes them.

    Collective: yes, every member; all give a board, or none does.

    Raises:
        GroupTimeoutError: a member did not take part in time.
        PeerLostError: one of this host's has ended.
        GroupAbortedError: a member has given up, or begun its set-up anew.
        SharedMemoryError: too little memory is free.
        ForeignMemoryError: somebody outside the group has offered a board.
    """
    with ExitStack() as undo:
        made = board or _make_board(exchange, exchange)
        if board is None:
            undo.callback(made.close)
            undo.enter_context(AbortOnError(made))
        inside = with_liveness(exchange, made, range(exchange.size))
        # A board's nonce names its segment: members with the same segment are on one node.
        segments = inside.all_gather("board", made.handle().segment.nonce)
        node_of = tuple(segments.index(each) for each in segments)
        if any(node_of):
            _start_heartbeat(exchange, made, node_of, address, undo)
        if board is None:
            # Runs before the heartbeat is closed, whose last beat then says that this one has left.
            undo.callback(made.leave)
        progress = ProgressEngine(made, "coordinator")
        undo.callback(progress.close)
        return HostTopology(made, tuple(range(exchange.size)), node_of, progress, undo.pop_all())


def known_nodes(
    board: Board, node_of: Sequence[int], members: Sequence[int] | None = None
) -> HostTopology:
    """The nodes that a launcher has named; nothing is exchanged.

    Args:
        board: this node's board.
        node_of: for each rank the first rank on its node.
        members: each rank's slot on the board; None: member i is rank i.

    Collective: no.
    """
    members = range(len(node_of)) if members is None else members
    progress = ProgressEngine(board, "coordinator")
    closing = ExitStack()
    closing.callback(progress.close)
    return HostTopology(board, tuple(members), tuple(node_of), progress, closing)


class AbortOnError:
    """Whoever fails inside tells the others why: it is about to leave, and they wait for it.

    Who was told to go, by `SystemExit` or `GeneratorExit`, has not failed.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.abort(error)

    def abort(self, error: BaseException | None) -> None:
        """Tell the others ``error``, unless it is none."""
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self._board.abort(error)


def with_liveness(exchange: Rendezvous, board: Board, members: Sequence[int]) -> Rendezvous:
    """``exchange``, in which nobody waits for ``members`` of the board that have ended."""

    def watch(operation: str, ready: Callable[[], bool]) -> None:
        board.require(operation, lambda: members, ready)

    return replace(exchange, watch=watch, seen_on=(board, members))


def _start_heartbeat(
    exchange: Rendezvous, board: Board, node_of: Sequence[int], address: str, undo: ExitStack
) -> None:
    told = exchange.all_gather("hosts", msgspec.msgpack.encode((socket.gethostname(), address)))
    names = _named(
        [
            exchange.decoded(_NAME_AND_ADDRESS, "hosts", each, rank)
            for rank, each in enumerate(told)
        ],
        node_of,
    )
    heartbeat = Heartbeat(
        exchange,
        board,
        {
            name: [rank for rank, first in enumerate(node_of) if first == node]
            for node, name in names.items()
        },
        names[node_of[exchange.rank]],
    )
    exchange.ask(f"{exchange.name} first heartbeat", heartbeat.send_first)
    exchange.all_gather("heartbeat")
    undo.callback(heartbeat.close)
    heartbeat.start()


def _named(told: Sequence[tuple[str, str]], node_of: Sequence[int]) -> dict[int, str]:
    """A unique name for each node: its host's; if these are not unique, with address or rank."""
    nodes = sorted(set(node_of))
    plain = [told[node][0] for node in nodes]
    addressed = [f"{name} ({told[node][1]})" for node, name in zip(nodes, plain, strict=True)]
    numbered = [f"{name} (of rank {node})" for node, name in zip(nodes, plain, strict=True)]
    different = (each for each in (plain, addressed) if len(set(each)) == len(nodes))
    return dict(zip(nodes, next(different, numbered), strict=True))


def _make_board(group: Rendezvous, members: Rendezvous) -> Board:
    """One round among the undecided ``members`` of ``group``: make or attach this node's board."""
    hints = members.all_gather("host", _boot_id())
    leader = hints.index(hints[members.rank])
    board: Board | None = None
    if leader == members.rank:
        board = Board.create(group.size, group.rank, "", group.called or None)
    offers = members.all_gather("boards", msgspec.msgpack.encode(board and board.handle()))
    if board is None:
        offer = members.decoded(_BOARD, "boards", offers[leader], leader)
        board = _try_to_attach(offer, group.rank)
    decided = members.all_gather("decided", b"yes" if board else b"")
    if board is not None:
        return board
    undecided = [each for each, answer in enumerate(decided) if not answer]
    left = replace(members.sub("undecided", undecided), marks=members.marks)
    return _make_board(group, left)


def _boot_id() -> bytes:
    """What only members of one host have in common; nothing, where that is hidden."""
    try:
        return _BOOT_ID.read_bytes()
    except OSError:
        return b""


def _try_to_attach(offer: BoardHandle, rank: int) -> Board | None:
    try:
        return Board.attach(offer, rank)
    except ForeignMemoryError:
        raise
    except SharedMemoryError:
        return None
