"""Map the device memory of other ranks: staging regions, and what captured graphs read.

Memory is named by a `Shared`: the handle of its allocation and the offset in it. Between ranks that
are threads of one process the plain address is used: a process cannot open its own handles.

Releasing
    Memory that a peer still maps must not be freed. Each rank unmaps everything, sets its word
    in the group's `UnmapFlags`, and frees its own memory when all peers have set theirs or have
    died. No collective call is needed. If a peer stays, the memory is freed by the end of the
    process only.

    Memory of torch's allocator, which captured graphs read, is torch's to free. Its owner finds out
    later (`Mappings.freed`), and tells the peers, which unmap it.

During a capture ranks cannot exchange anything, and a kernel's arguments are fixed. So a captured
collective gets the address of a table on the device (`device_comm.cuda.ipc.abi.KernelJob`).
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
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from device_comm.cuda.agree import unanimous
from device_comm.cuda.driver import Driver, NotShareableError
from device_comm.cuda.ipc.abi import SOURCES_BYTES, pack_sources
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DivergenceError
from shm_broadcast.process import ProcessId, ProcessWatch
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from device_comm.cuda.agree import AllGatherBytes


_FIRST_WORD = 64
"""The offset of the first word of `UnmapFlags`, after the segment's header."""

_NAP = 0.001
"""Seconds between two looks at who has departed."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Names one rank's device memory to its peers.

    Attributes:
        pid: the owner's process id.
        start_time: the owner's start time; see `ProcessId`.
        device: the `Driver.identity` of the memory's device.
        pointer: the address in the owner's process.
        handle: the allocation's handle; see `Exported`.
        offset: the offset in the allocation; see `Exported`.
        allocation: the allocation's number in the owner's process; see `Exported`.
    """

    pid: int
    start_time: int
    device: str
    pointer: int
    handle: bytes
    offset: int
    allocation: int


class FreedMemory(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has freed of the memory that it had shared.

    Attributes:
        pid: the owner's process id.
        start_time: the owner's start time.
        allocations: their numbers; see `Exported`.
    """

    pid: int
    start_time: int
    allocations: list[int]


class Mappings:
    """One rank's mappings of its peers' memory. Each allocation is mapped once, until it is
    forgotten or all are closed.
    """

    def __init__(self, driver: Driver) -> None:
        """Begin without mappings."""
        self._driver = driver
        self._me = ProcessId.current()
        self._bases: dict[tuple[int, int, int], int] = {}
        self._given: dict[int, int] = {}
        self._reached = {driver.identity}

    def export(self, pointer: int) -> Shared:
        """Name this rank's memory to its peers.

        Raises:
            NotShareableError: it cannot be shared; says why.
        """
        exported = self._driver.export(pointer)
        self._given[exported.allocation] = pointer
        return Shared(
            self._me.pid,
            self._me.start_time,
            self._driver.identity,
            pointer,
            exported.handle,
            exported.offset,
            exported.allocation,
        )

    def freed(self) -> FreedMemory:
        """Which of the memory that this rank had shared was freed since the last call."""
        allocations = [
            allocation
            for allocation, pointer in self._given.items()
            if self._driver.allocation(pointer) != allocation
        ]
        for allocation in allocations:
            del self._given[allocation]
        return FreedMemory(self._me.pid, self._me.start_time, allocations)

    def unmap(self, gone: FreedMemory) -> None:
        """Unmap what a peer has freed."""
        for allocation in gone.allocations:
            base = self._bases.pop((gone.pid, gone.start_time, allocation), None)
            if base is not None:
                self._driver.unmap(base)

    def address(self, shared: Shared) -> int:
        """The address of a peer's memory in this process; maps it if need be.

        Raises:
            DeviceError: it cannot be mapped.
        """
        if (shared.pid, shared.start_time) == (self._me.pid, self._me.start_time):
            if shared.device not in self._reached:
                self._driver.reach(shared.device)
                self._reached.add(shared.device)
            return shared.pointer
        key = (shared.pid, shared.start_time, shared.allocation)
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self._driver.map(shared.handle)
        return base + shared.offset

    def close(self) -> None:
        """Unmap everything."""
        while self._bases:
            self._driver.unmap(self._bases.popitem()[1])


class UnmapFlags:
    """Which ranks have unmapped everything: a word for each rank, in shared host memory."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Use ``segment``, which `close` closes, as rank ``rank``."""
        self._segment = segment
        self._rank = rank

    @classmethod
    def create(cls, rank: int) -> Self:
        """Create the words; the other ranks need their `handle`."""
        return cls(Segment.create(1, "ipc-departures"), rank)

    @classmethod
    def attach(cls, handle: SegmentHandle, rank: int) -> Self:
        """Map the words that another rank has created.

        Raises:
            SharedMemoryError: that rank's process has ended.
        """
        return cls(Segment.attach(handle), rank)

    def handle(self) -> SegmentHandle:
        """The handle for `attach`."""
        return self._segment.handle()

    def set_unmapped(self) -> None:
        """Tell the others that this rank has unmapped everything."""
        self._segment.words.store32(_FIRST_WORD + 4 * self._rank, 1)

    def wait(self, peers: Sequence[tuple[int, ProcessId]], deadline: Deadline) -> bool:
        """Wait until these ranks have departed or died; False if the deadline passes first."""
        with ExitStack() as watches:
            waiting = {rank: ProcessWatch(process) for rank, process in peers}
            for watch in waiting.values():
                watches.callback(watch.close)
            while True:
                for rank in [rank for rank, watch in waiting.items() if self._gone(rank, watch)]:
                    del waiting[rank]
                if not waiting or deadline.expired:
                    return not waiting
                time.sleep(deadline.remaining(at_most=_NAP))

    def close(self) -> None:
        """Unmap the words."""
        self._segment.close()

    def _gone(self, rank: int, watch: ProcessWatch) -> bool:
        return bool(self._segment.words.load32(_FIRST_WORD + 4 * rank)) or not watch.alive()


ENTRIES = 65536
"""The number of tables in one block of 4 MiB. A capture has at least half as many."""

_FAILED = "ended its capture by an error"
_log = logging.getLogger(__name__)


class _CaptureBegin(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says before a capture.

    Attributes:
        reason: why memory of torch's allocator cannot be shared; ``""`` if it can.
        gone: what it has freed.
    """

    reason: str
    gone: FreedMemory


class _CaptureReport(msgspec.Struct, frozen=True, array_like=True):
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


_BEGINNING = msgspec.msgpack.Decoder(_CaptureBegin)
_ACCOUNT = msgspec.msgpack.Decoder(_CaptureReport)


class _Reserved(NamedTuple):
    table: int
    source: int


class GraphBufferRegistry:
    """One rank's tables.

    Attributes:
        reasons: why captured collectives had to be staged; empty if none were.
    """

    def __init__(self, driver: Driver, mappings: Mappings, rank: int, swap: AllGatherBytes) -> None:
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
        said = [_BEGINNING.decode(each) for each in unanimous(self._swap, self._prepare)]
        for each in said:
            self._mappings.unmap(each.gone)
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
        mine = _CaptureBegin(self._driver.why_pool_not_shareable(), self._mappings.freed())
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
        unanimous(self._swap, lambda: self._fill(accounts))

    def close(self) -> None:
        """Free the tables; no graph may be replayed any more."""
        while self._blocks:
            self._driver.free(self._blocks.pop())

    def _account(self, failed: bool) -> _CaptureReport:
        if failed:
            return _CaptureReport(_FAILED)
        try:
            memory = [self._mappings.export(each.source) for each in self._reserved]
        except NotShareableError as error:
            return _CaptureReport(str(error))
        return _CaptureReport("", self._events, memory, self._sent, self._received)

    def _fill(self, accounts: list[_CaptureReport]) -> bytes:
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


def _compare(rank: int, ours: _CaptureReport, theirs: _CaptureReport) -> None:
    for account in (ours, theirs):
        if account.problem:
            raise DivergenceError(rank, ours.problem or "captured", theirs.problem or "captured")
    if ours.events == theirs.events:
        return
    pairs = zip([*ours.events, "nothing"], [*theirs.events, "nothing"], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise DivergenceError(rank, here, there)


def _compare_messages(here: int, accounts: Sequence[_CaptureReport]) -> None:
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
