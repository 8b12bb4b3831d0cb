"""Tells the other hosts what this host's board says, and reads theirs, over the members' store.

    store      beat/FIRST-MEMBER-OF-THE-HOST: that host's latest `Beat`
    thread     every `PERIOD_SECONDS`: reads all beats; writes this host's, if it is old

A topology on one host has no heartbeat. Every process of a host reads the beats. The host's own
beat is written by whichever of its processes finds it too old, so a process that is stopped or dead
does not silence its host. The thread has its own connection to the store: a request that the store
does not answer blocks all later ones on the same connection.

The beats are passed to `RemoteBoards`, except failures, which abort this host's board.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torch.distributed import FileStore, HashStore

from coordinator.hosts.remote_boards import RemoteBoards, compose, number_of
from coordinator.stores.asked_store import AskedStore, behind_prefixes
from coordinator.stores.store_asker import values_of
from shm_broadcast import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import Store

    from coordinator.setup.exchange import Exchange
    from shm_broadcast import Board

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
        exchange: Exchange,
        board: Board,
        hosts: Mapping[str, Sequence[int]],
        here: str,
    ) -> None:
        """Prepare; `first_beat` and `start` follow.

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
        board.hear(self.boards)

    def first_beat(self) -> None:
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
        self.boards.swap = _nothing  # as bound, it has the board that has it
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
        beat = compose(self._board, self._members, time.monotonic_ns())
        store.set(self._key, beat)  # type: ignore[arg-type] # the stub knows text only


def _nothing() -> None:
    pass


def _key(members: Sequence[int]) -> str:
    return f"beat/{members[0]}"


def _own_connection(store: Store) -> Store:
    """A second connection to the same store; an `AskedStore` has only one, for all threads."""
    if isinstance(behind_prefixes(store), AskedStore):
        return store
    return store.clone()  # type: ignore[attr-defined,no-any-return]
