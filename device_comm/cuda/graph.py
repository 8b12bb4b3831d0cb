"""Which memory captured collectives read, and how peers come to know it.

While a stream captures, nothing can be exchanged, and what a kernel is given is fixed. So a
captured collective gets the address of a table on the device (see `device_comm.cuda.abi.Job`),
which is filled once the capture has ended: all ranks swap the handles of the memory that they
captured, map it, and write down where each rank's lies. The table entries of one collective
never change after that, and graphs may be replayed in any number and order.

Where torch's memory cannot be shared, all ranks capture collectives that go through the
staging, as eager ones do; `Registry.reasons` says why. So do ranks that run out of entries.
Ranks that captured different collectives raise `DivergenceError` at the end of the capture: their
graphs must not be replayed.

Assumes: captured memory lives as long as the graphs do; entries live as long as the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from device_comm.cuda.abi import SOURCES_BYTES, pack_sources
from device_comm.cuda.agree import agree
from device_comm.cuda.errors import NotShareableError
from device_comm.cuda.ipc import Shared  # noqa: TC001 - msgspec looks at it
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from device_comm.cuda.agree import Swap
    from device_comm.cuda.driver import Driver
    from device_comm.cuda.ipc import Mappings

ENTRIES = 16384
"""Tables in one block: 1 MiB. A capture has at least half as many."""

_FAILED = "ended its capture by an error"


class _Account(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has captured.

    Attributes:
        problem: why nothing of it can be used; ``""`` if it can.
        events: in order, what each collective was, and whether it has a table.
        memory: what it captured, for each table.
    """

    problem: str
    events: list[str]
    memory: list[Shared]


class _Reserved(NamedTuple):
    table: int
    source: int


class Registry:
    """The tables of one rank of a group."""

    def __init__(self, driver: Driver, mappings: Mappings, rank: int, swap: Swap) -> None:
        """Reserve nothing yet.

        Args:
            driver: of the device.
            mappings: to lend what was captured, and to borrow that of others.
            rank: this one.
            swap: gives bytes of this rank to all, and returns those of all, by rank.
        """
        self._driver = driver
        self._mappings = mappings
        self._rank = rank
        self._swap = swap
        self._blocks: list[int] = []
        self._free = 0
        self._open = False
        self._direct = False
        self._events: list[str] = []
        self._reserved: list[_Reserved] = []
        self.reasons: list[str] = []

    def begin(self) -> None:
        """Get ready for captures. Collective: yes, every member.

        Raises:
            ValueError: a capture is under way.
        """
        if self._open:
            raise ValueError("captures of one group do not nest")
        if self._free < ENTRIES // 2:
            self._blocks.append(self._driver.allocate(ENTRIES * SOURCES_BYTES))
            self._free = ENTRIES
        said = [
            each.decode() for each in self._swap(self._driver.why_pool_not_shareable().encode())
        ]
        refused = [f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason]
        self._direct = not refused
        self._note(refused)
        self._open = True
        self._events, self._reserved = [], []

    def reserve(self, operation: str, source: int) -> int:
        """The address of a table for a collective that is being captured; 0: stage it.

        Args:
            operation: what it is, with its size: the same on all ranks.
            source: the memory of this rank that it reads.
        """
        if not self._open:
            self._note(["a capture outside of graph_capture()"])
            return 0
        reason = ""
        if self._direct:
            reason = self._driver.why_not_shareable(source)
            if not self._free:
                reason = f"more than {ENTRIES} collectives captured at once"
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
        """Fill the tables of what was captured. Collective: yes, every member.

        Args:
            failed: the capture has ended by an error, and is not used here.

        Raises:
            DivergenceError: ranks captured different collectives, or one has failed.
            IpcUnavailableError: some rank cannot map what was captured.
        """
        self._open = False
        account = self._account(failed)
        accounts = [
            msgspec.msgpack.decode(each, type=_Account)
            for each in self._swap(msgspec.msgpack.encode(account))
        ]
        if failed:
            return
        for rank, other in enumerate(accounts):
            _compare(rank, account, other)
        agree(self._swap, lambda: self._fill(accounts))

    def close(self) -> None:
        """Give the tables back: no graph is replayed any more."""
        while self._blocks:
            self._driver.free(self._blocks.pop())

    def _account(self, failed: bool) -> _Account:
        if failed:
            return _Account(_FAILED, [], [])
        try:
            memory = [self._mappings.share(each.source) for each in self._reserved]
        except NotShareableError as error:
            return _Account(str(error), [], [])
        return _Account("", self._events, memory)

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
        self.reasons += [reason for reason in reasons if reason not in self.reasons]


def _compare(rank: int, ours: _Account, theirs: _Account) -> None:
    for account in (ours, theirs):
        if account.problem:
            raise DivergenceError(rank, ours.problem or "captured", theirs.problem or "captured")
    if ours.events == theirs.events:
        return
    pairs = zip([*ours.events, "nothing"], [*theirs.events, "nothing"], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise DivergenceError(rank, here, there)


__all__ = ["ENTRIES", "Registry"]
