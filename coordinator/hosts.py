"""Determine which members share a host, make each host's board, exchange heartbeats between hosts.

Members share a host if they can attach the same board. They try it: containers of one machine that
cannot see each other's processes are different hosts. The boot id is only a hint. A round of
attempts: among the undecided members with the same hint the first one creates a board, and the
others try to attach it. The first one and those that attach are decided. Without isolated processes
one round suffices.

    store      beat/FIRST-MEMBER-OF-THE-HOST: that host's latest `HostHeartbeat`
    thread     every `PERIOD_SECONDS`: reads all heartbeats; writes this host's, if it is old

Groups on one host have no heartbeat. Any process of a host may write its heartbeat, so a stopped or
dead process does not silence its host. The thread has its own connection to the store, because an
unanswered request blocks all later ones on its connection. Heartbeats go to `RemoteBoards`; a
failure in one aborts this host's board.
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
from coordinator.stores import SealedStore, base_of, behind_prefixes, values_of
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
"""The period in which each process reads all heartbeats and writes its host's if due."""

_DUE_SECONDS: Final = 0.2
"""The age at which a process writes a new heartbeat of its host. Shorter than the period: a single
process on a host writes in each period."""

_SWAPPED_WITHIN: Final = 0.5
"""The longest time that a call which reports a failure waits until other hosts can read it."""

_LAST_WRITE_SECONDS: Final = 1.0
"""The longest time that `Heartbeat.close` waits for the last heartbeat to be written."""


class Heartbeat:
    """One process's heartbeat thread. Close it before its board and its store."""

    def __init__(
        self,
        exchange: Rendezvous,
        board: Board,
        hosts: Mapping[str, Sequence[int]],
        here: str,
    ) -> None:
        """Prepare; `send_first` and `start` follow.

        ``hosts`` has the members of each host by its name; ``here`` is this host's name.
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
        """Write this host's heartbeat. Collective: yes, every member, before any calls `start`."""
        self._write(self._store)

    def start(self) -> None:
        """Start the thread. All hosts must have written their first heartbeats.

        Does nothing with a `FileStore`, whose file would grow with each heartbeat, and with a
        `HashStore`, which other processes cannot read. Then hosts do not detect each other's
        failures.
        """
        if not isinstance(base_of(self._store), (FileStore, HashStore)):
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Write the last heartbeat and end the thread; idempotent.

        The member that hosts the store then waits for two periods, so that the others can read it.
        """
        self.boards.refresh = _nothing  # breaks a reference cycle with the board
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        if thread.is_alive():  # start() may have failed
            thread.join(_LAST_WRITE_SECONDS)
        if self._keeps_store and not thread.is_alive():
            time.sleep(2 * PERIOD_SECONDS)

    def _swap(self) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self._turns:
            self._wanted += 1
            ticket = self._wanted
            self._wake.set()
            self._turns.wait_for(lambda: self._done >= ticket, _SWAPPED_WITHIN)

    def _run(self) -> None:
        try:
            store = _own_connection(self._store)
            while not self._closing:
                with suppress(GroupTimeoutError):
                    self._turn(store)
                self._wake.wait(PERIOD_SECONDS)
                self._wake.clear()
            self._write(store)
        except Exception as error:  # noqa: BLE001 - a lost store raises anything
            self.boards.store_ended(str(error).partition("\n")[0])
        finally:
            self._end_turn(sys.maxsize)

    def _turn(self, store: Store) -> None:
        # Read before the heartbeats: the next turn serves a later `_swap`.
        wanted = self._wanted
        # If the store is lost, this raises; `get` would print to stderr as well.
        store.check([self._key])
        own, *others = values_of(store, [self._key, *self._others])
        self.boards.pass_on(others, self._board)
        age = time.monotonic_ns() - number_of(own)
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
    """Return a second connection to the same store; no request of a `SealedStore` blocks."""
    if isinstance(behind_prefixes(store), SealedStore):
        return store
    return store.clone()  # type: ignore[attr-defined,no-any-return]


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_AND_ADDRESS = msgspec.msgpack.Decoder(tuple[str, str])
_BOARD = msgspec.msgpack.Decoder(BoardHandle)


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The hosts of a group, and this host's board, which stays open if it was given.

    Attributes:
        board: the board of this host's members. A member's slot may differ from its rank in the
            group.
        members: each member's slot on the board, by rank in the group.
        node_of: for each rank in the group, the first rank of its host.
        progress: runs background operations, for all groups on the board.
    """

    board: Board
    members: tuple[int, ...]
    node_of: tuple[int, ...]
    progress: ProgressEngine
    closing: ExitStack

    def all(self) -> list[list[int]]:
        """Return the ranks of each host, in the order of the hosts' first ranks."""
        return [
            [rank for rank, first in enumerate(self.node_of) if first == node]
            for node in sorted(set(self.node_of))
        ]

    def sub(self, ranks: Sequence[int]) -> HostTopology:
        """Return the topology of the subgroup of ``ranks``, with the same board."""
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
        """Leave the board and end the heartbeat; idempotent."""
        self.closing.close()


def find_nodes(exchange: Rendezvous, board: Board | None = None, address: str = "") -> HostTopology:
    """Determine which members share a host; between hosts, start the heartbeat.
    Collective: yes, every member. The caller closes the result.

    Args:
        exchange: the members' rendezvous.
        board: this host's board, if a launcher made it: member i is rank i. None: each host makes
            one. All members pass a board, or none does.
        address: this host's address, to distinguish hosts with the same name.

    Raises:
        GroupTimeoutError: a member did not take part in time.
        PeerLostError: a member on this host exited.
        GroupAbortedError: a member aborted.
        SharedMemoryError: too little memory is free.
        ForeignMemoryError: a process outside the group offered a board.
    """
    with ExitStack() as undo:
        own_board = board or _make_board(exchange, exchange)
        if board is None:
            undo.callback(own_board.close)
            undo.enter_context(AbortOnError(own_board))
        inside = with_liveness(exchange, own_board, range(exchange.size))
        # A board's nonce names its segment: members with the same segment share a host.
        segments = inside.all_gather("board", own_board.handle().segment.nonce)
        node_of = tuple(segments.index(each) for each in segments)
        if any(node_of):
            _start_heartbeat(exchange, own_board, node_of, address, undo)
        if board is None:
            # Runs before the heartbeat closes: the last one then shows that this member has left.
            undo.callback(own_board.leave)
        progress = ProgressEngine(own_board, "coordinator")
        undo.callback(progress.close)
        return HostTopology(
            own_board, tuple(range(exchange.size)), node_of, progress, undo.pop_all()
        )


def known_nodes(
    board: Board, node_of: Sequence[int], members: Sequence[int] | None = None
) -> HostTopology:
    """Return the topology that a launcher provides; nothing is exchanged.

    ``node_of``: for each rank the first rank on its host; ``members``: its slot, None: member i is
    rank i.
    """
    members = range(len(node_of)) if members is None else members
    progress = ProgressEngine(board, "coordinator")
    closing = ExitStack()
    closing.callback(progress.close)
    return HostTopology(board, tuple(members), tuple(node_of), progress, closing)


class AbortOnError:
    """Context manager that aborts the board with an exception raised inside, except exits."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.abort(error)

    def abort(self, error: BaseException | None) -> None:
        """Abort the board with ``error``; None and exits do nothing."""
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self._board.abort(error)


def with_liveness(exchange: Rendezvous, board: Board, members: Sequence[int]) -> Rendezvous:
    """Return ``exchange`` with waits that raise if one of ``members`` of the board exits."""

    def watch(operation: str, ready: Callable[[], bool]) -> None:
        board.require(operation, lambda: members, ready)

    return replace(exchange, watch=watch, seen_on=(board, members))


def _start_heartbeat(
    exchange: Rendezvous, board: Board, node_of: Sequence[int], address: str, undo: ExitStack
) -> None:
    payloads = exchange.all_gather("hosts", msgspec.msgpack.encode((socket.gethostname(), address)))
    names = _named(
        [
            exchange.decoded(_NAME_AND_ADDRESS, "hosts", each, rank)
            for rank, each in enumerate(payloads)
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


def _named(
    names_and_addresses: Sequence[tuple[str, str]], node_of: Sequence[int]
) -> dict[int, str]:
    """Return a unique name per host: its host name; if not unique, with address or rank."""
    nodes = sorted(set(node_of))
    plain = [names_and_addresses[node][0] for node in nodes]
    addressed = [
        f"{name} ({names_and_addresses[node][1]})" for node, name in zip(nodes, plain, strict=True)
    ]
    numbered = [f"{name} (of rank {node})" for node, name in zip(nodes, plain, strict=True)]
    unique = (each for each in (plain, addressed) if len(set(each)) == len(nodes))
    return dict(zip(nodes, next(unique, numbered), strict=True))


def _make_board(group: Rendezvous, members: Rendezvous) -> Board:
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
    rest = replace(members.sub("undecided", undecided), marks=members.marks)
    return _make_board(group, rest)


def _boot_id() -> bytes:
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
