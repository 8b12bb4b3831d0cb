"""Tells peers which memory captured collectives read, so that they can read it directly.

During a capture ranks cannot exchange anything, and a kernel's arguments are fixed. So a captured
collective gets the address of a table on the device (`device_comm.cuda.launches.abi.KernelJob`).
The table is filled when the capture has ended: all ranks swap the handles of the memory that they
have captured, map it, and write each rank's address into the table. The table never changes after
that, so graphs may be replayed any number of times and in any order.

If torch's memory cannot be shared, all ranks capture collectives that go through the staging
buffers, as eager ones do; `Registry.reasons` says why. The same happens when tables run out. If
ranks have captured different collectives, or a message without its other end, they raise
`DivergenceError` at the end of the capture: their graphs must not be replayed.

Before each capture the ranks tell each other which of the memory that they captured before has been
freed, and unmap it. So graphs may be captured anew any number of times. Tables are not used again.

Assumes: captured memory lives as long as the graphs; tables live as long as the group.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from device_comm.cuda.agree import agree
from device_comm.cuda.errors import NotShareableError
from device_comm.cuda.ipc.mappings import Gone, Shared  # noqa: TC001 - msgspec looks at them
from device_comm.cuda.launches.abi import SOURCES_BYTES, pack_sources
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.agree import Swap
    from device_comm.cuda.device.driver import Driver
    from device_comm.cuda.ipc.mappings import Mappings

ENTRIES = 65536
"""The number of tables in one block of 4 MiB. A capture has at least half as many."""

_FAILED = "ended its capture by an error"
_log = logging.getLogger(__name__)


class _Beginning(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says before a capture.

    Attributes:
        reason: why memory of torch's allocator cannot be shared; ``""`` if it can.
        gone: what it has freed.
    """

    reason: str
    gone: Gone


class _Account(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has captured.

    Attributes:
        problem: why its graphs cannot be used; ``""`` if they can.
        events: a description of each captured collective, in order; says if it was staged.
        memory: the captured input of each collective that has a table.
        sent: the bytes of each captured send, in order, by the rank that it goes to.
        received: those of each captured receive, by the rank that it comes from.
    """

    problem: str
    events: list[str] = []
    memory: list[Shared] = []
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}


_BEGINNING = msgspec.msgpack.Decoder(_Beginning)
_ACCOUNT = msgspec.msgpack.Decoder(_Account)


class _Reserved(NamedTuple):
    table: int
    source: int


class Registry:
    """One rank's tables.

    Attributes:
        reasons: why captured collectives had to be staged; empty if none were.
    """

    def __init__(self, driver: Driver, mappings: Mappings, rank: int, swap: Swap) -> None:
        """Begin without tables.

        Args:
            driver: the device's driver.
            mappings: shares the captured memory, and maps the peers'.
            rank: this rank.
            swap: gives this rank's bytes to all ranks, and returns all ranks' bytes, by rank.
        """
        self._driver = driver
        self._mappings = mappings
        self._rank = rank
        self._swap = swap
        self._blocks: list[int] = []
        self._free = 0
        self._depth = 0
        self._failed = False
        self._direct = False
        self._events: list[str] = []
        self._reserved: list[_Reserved] = []
        self._sent: dict[int, list[int]] = {}
        self._received: dict[int, list[int]] = {}
        self.reasons: list[str] = []

    def begin(self) -> None:
        """Prepare for captures, or join those begun before. Collective: yes, every member.

        Raises:
            IpcUnavailableError: a rank cannot, for example because it lacks memory.
        """
        if self._depth:
            self._depth += 1
            return
        said = [_BEGINNING.decode(each) for each in agree(self._swap, self._prepare)]
        for each in said:
            self._mappings.forget(each.gone)
        refused = [f"rank {rank}: {each.reason}" for rank, each in enumerate(said) if each.reason]
        self._direct = not refused
        self._note(refused)
        self._depth, self._failed = 1, False
        self._events, self._reserved = [], []
        self._sent, self._received = {}, {}

    def _prepare(self) -> bytes:
        if self._free < ENTRIES // 2:
            self._blocks.append(self._driver.allocate(ENTRIES * SOURCES_BYTES))
            self._free = ENTRIES
        mine = _Beginning(self._driver.why_pool_not_shareable(), self._mappings.gone())
        return msgspec.msgpack.encode(mine)

    def note_message(self, verb: str, peer: int, size: int) -> None:
        """Note a captured ``send`` or ``recv`` of ``size`` bytes."""
        if self._depth:
            messages = self._sent if verb == "send" else self._received
            messages.setdefault(peer, []).append(size)

    def reserve(self, operation: str, source: int) -> int:
        """The address of a table for a collective that is being captured; 0: use the staging.

        Args:
            operation: a description with the size, which must be the same on all ranks.
            source: the address of this rank's input.
        """
        if not self._depth:
            self._note(["a capture outside of graph_capture()"])
            return 0
        reason = ""
        if self._direct:
            reason = self._driver.why_not_shareable(source)
            if not self._free:
                reason = f"more than {len(self._reserved)} collectives captured at once"
        if reason or not self._direct:
            self._note([reason] if reason else [])
            self._events.append(f"{operation}, staged")
            return 0
        table = self._blocks[-1] + (ENTRIES - self._free) * SOURCES_BYTES
        self._free -= 1
        self._events.append(operation)
        self._reserved.append(_Reserved(table, source))
        return table

    def finish(self, *, failed: bool = False) -> None:
        """Fill the tables, if no captures begun before go on. Collective: yes, every member.

        Args:
            failed: whether the capture has raised here, so that its graphs are not used.

        Raises:
            DivergenceError: ranks captured different collectives, or a message without its other
                end, or the capture failed on one.
            IpcUnavailableError: a rank cannot map the captured memory.
        """
        self._depth -= 1
        self._failed |= failed
        if self._depth:
            return
        account = self._account(self._failed)
        accounts = [_ACCOUNT.decode(each) for each in self._swap(msgspec.msgpack.encode(account))]
        if failed:
            return
        for rank, other in enumerate(accounts):
            _compare(rank, account, other)
        _compare_messages(self._rank, accounts)
        agree(self._swap, lambda: self._fill(accounts))

    def close(self) -> None:
        """Free the tables; no graph may be replayed any more."""
        while self._blocks:
            self._driver.free(self._blocks.pop())

    def _account(self, failed: bool) -> _Account:
        if failed:
            return _Account(_FAILED)
        try:
            memory = [self._mappings.share(each.source) for each in self._reserved]
        except NotShareableError as error:
            return _Account(str(error))
        return _Account("", self._events, memory, self._sent, self._received)

    def _fill(self, accounts: list[_Account]) -> bytes:
        rows = []
        for index, reserved in enumerate(self._reserved):
            addresses = [
                reserved.source
                if rank == self._rank
                else self._mappings.address(account.memory[index])
                for rank, account in enumerate(accounts)
            ]
            rows.append(pack_sources(addresses))
        if rows:
            self._driver.write(self._reserved[0].table, b"".join(rows))
        return b""

    def _note(self, reasons: list[str]) -> None:
        for reason in reasons:
            if reason not in self.reasons:
                self.reasons.append(reason)
                _log.warning("captured collectives copy their inputs: %s", reason)


def _compare(rank: int, ours: _Account, theirs: _Account) -> None:
    for account in (ours, theirs):
        if account.problem:
            raise DivergenceError(rank, ours.problem or "captured", theirs.problem or "captured")
    if ours.events == theirs.events:
        return
    pairs = zip([*ours.events, "nothing"], [*theirs.events, "nothing"], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise DivergenceError(rank, here, there)


def _compare_messages(here: int, accounts: Sequence[_Account]) -> None:
    """Require that what a rank has captured to send, the other has captured to receive.

    All ranks compare all pairs: where two of them cannot go on, the others do not either.
    """
    for src, dst in itertools.permutations(range(len(accounts)), 2):
        sent, taken = accounts[src].sent.get(dst, []), accounts[dst].received.get(src, [])
        if sent == taken:
            continue
        sends, receives = f"sends of {sent} bytes", f"receives of {taken} bytes"
        if here == dst:
            raise DivergenceError(src, receives, sends)
        ours = sends if here == src else f"nothing, and another rank {sends}"
        raise DivergenceError(dst, ours, receives)
