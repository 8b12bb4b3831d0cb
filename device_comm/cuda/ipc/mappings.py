"""Map the device memory of other ranks: staging regions, and inputs of captured graphs.

A `Shared` names memory: the handle of its allocation and an offset. Ranks that are threads of one
process use the plain address: a process cannot open its own handles.

Release: a peer must unmap memory before it is freed. Each rank unmaps everything, sets its word in
the group's `UnmapFlags`, and frees its memory after all peers have set theirs or have died; no
collective is needed. Otherwise only the end of the process frees it. torch frees memory of its
allocator, which captured graphs read: the owner detects this later (`Mappings.freed`), and the
peers unmap it before the next capture.

Capture: ranks cannot communicate during a capture, and a kernel's arguments are fixed. So a
captured collective gets the address of a device table (`device_comm.cuda.ipc.abi.KernelJob`). At
the end of the capture all ranks exchange the handles of the captured memory, map it, and write each
rank's address into the table, which then never changes and is never reused. Graphs may be replayed
any number of times, in any order.

If torch's memory cannot be shared, or tables run out, all ranks capture staged collectives;
`GraphBufferRegistry.reasons` has the reasons. If ranks captured different collectives, or a message
without its other end, they raise `DivergenceError` at the end of the capture: the graphs must not
be replayed.

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
"""Seconds between two polls of the flags."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The name of one rank's device memory for its peers; see `Exported`.

    ``pid`` and ``start_time`` are the owner's `ProcessId`, ``device`` is the `Driver.identity`, and
    ``pointer`` the address in the owner's process.
    """

    pid: int
    start_time: int
    device: str
    pointer: int
    handle: bytes
    offset: int
    allocation: int


class FreedMemory(msgspec.Struct, frozen=True, array_like=True):
    """The shared ``allocations`` (see `Exported`) that a process has freed."""

    pid: int
    start_time: int
    allocations: list[int]


class Mappings:
    """One rank's mappings of its peers' memory; each allocation is mapped once."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._me = ProcessId.current()
        self._bases: dict[tuple[int, int, int], int] = {}
        self._given: dict[int, int] = {}
        self._reached = {driver.identity}

    def export(self, pointer: int) -> Shared:
        """Name this rank's memory to its peers.

        Raises:
            NotShareableError: it cannot be shared.
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
        """Return the shared memory that was freed since the last call."""
        allocations = [
            allocation
            for allocation, pointer in self._given.items()
            if self._driver.allocation(pointer) != allocation
        ]
        for allocation in allocations:
            del self._given[allocation]
        return FreedMemory(self._me.pid, self._me.start_time, allocations)

    def unmap(self, gone: FreedMemory) -> None:
        """Unmap memory that a peer has freed."""
        for allocation in gone.allocations:
            base = self._bases.pop((gone.pid, gone.start_time, allocation), None)
            if base is not None:
                self._driver.unmap(base)

    def address(self, shared: Shared) -> int:
        """Return the address of a peer's memory in this process; map it if necessary.

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
    """A word per rank in shared host memory: set after the rank has unmapped everything."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Use ``segment``, which `close` closes."""
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
        """Return the handle for `attach`."""
        return self._segment.handle()

    def set_unmapped(self) -> None:
        """Publish that this rank has unmapped everything."""
        self._segment.words.store32(_FIRST_WORD + 4 * self._rank, 1)

    def wait(self, peers: Sequence[tuple[int, ProcessId]], deadline: Deadline) -> bool:
        """Wait until these ranks have set their words or died; return False at the deadline."""
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
"""The number of tables in one block of 4 MiB. Each capture has at least half of them."""

_FAILED = "ended its capture with an error"
_log = logging.getLogger(__name__)


class _CaptureBegin(msgspec.Struct, frozen=True, array_like=True):
    """A rank's freed memory before a capture, and why torch's cannot be shared, or ``""``."""

    reason: str
    gone: FreedMemory


class _CaptureReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's captured operations, or the ``problem`` that makes its graphs unusable.

    ``events`` describe the collectives in order; ``memory`` has the input of each one with a table.
    ``sent`` and ``received`` have the bytes of each message in order, by the other rank.
    """

    problem: str
    events: list[str] = []
    memory: list[Shared] = []
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}


_BEGIN_DECODER = msgspec.msgpack.Decoder(_CaptureBegin)
_REPORT_DECODER = msgspec.msgpack.Decoder(_CaptureReport)


class _Reserved(NamedTuple):
    table: int
    source: int


class GraphBufferRegistry:
    """One rank's tables.

    Attributes:
        reasons: why captured collectives were staged; empty if none were.
    """

    def __init__(self, driver: Driver, mappings: Mappings, rank: int, swap: AllGatherBytes) -> None:
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
        """Prepare for captures, or join earlier ones. Collective: yes, every member.

        Raises:
            IpcUnavailableError: a rank cannot, for example for lack of memory.
        """
        if self._depth:
            self._depth += 1
            return
        received = [_BEGIN_DECODER.decode(each) for each in unanimous(self._swap, self._prepare)]
        for each in received:
            self._mappings.unmap(each.gone)
        refused = [
            f"rank {rank}: {each.reason}" for rank, each in enumerate(received) if each.reason
        ]
        self._direct = not refused
        self._note(refused)
        self._depth, self._failed = 1, False
        self._events, self._reserved = [], []
        self._sent, self._received = {}, {}

    def _prepare(self) -> bytes:
        if self._free < ENTRIES // 2:
            self._blocks.append(self._driver.allocate(ENTRIES * SOURCES_BYTES))
            self._free = ENTRIES
        message = _CaptureBegin(self._driver.why_pool_not_shareable(), self._mappings.freed())
        return msgspec.msgpack.encode(message)

    def note_message(self, verb: str, peer: int, size: int) -> None:
        """Record a captured ``send`` or ``recv`` of ``size`` bytes."""
        if self._depth:
            messages = self._sent if verb == "send" else self._received
            messages.setdefault(peer, []).append(size)

    def reserve(self, operation: str, source: int) -> int:
        """Return the address of a table for a captured collective; 0: use the staging buffer.

        ``operation`` is a description with the size, the same on all ranks; ``source`` is the
        address of this rank's input.
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
        """Fill the tables at the end of the outermost capture. Collective: yes, every member.

        ``failed``: the capture has raised here, so its graphs are not used.

        Raises:
            DivergenceError: ranks captured different collectives, or a message without its other
                end, or the capture failed on one.
            IpcUnavailableError: a rank cannot map the captured memory.
        """
        self._depth -= 1
        self._failed |= failed
        if self._depth:
            return
        report = self._account(self._failed)
        reports = [
            _REPORT_DECODER.decode(each) for each in self._swap(msgspec.msgpack.encode(report))
        ]
        if failed:
            return
        for rank, other in enumerate(reports):
            _compare(rank, report, other)
        _compare_messages(self._rank, reports)
        unanimous(self._swap, lambda: self._fill(reports))

    def close(self) -> None:
        """Free the tables; graphs may no longer be replayed."""
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

    def _fill(self, reports: list[_CaptureReport]) -> bytes:
        rows = []
        for index, reserved in enumerate(self._reserved):
            addresses = [
                reserved.source
                if rank == self._rank
                else self._mappings.address(report.memory[index])
                for rank, report in enumerate(reports)
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
    for report in (ours, theirs):
        if report.problem:
            raise DivergenceError(rank, ours.problem or "captured", theirs.problem or "captured")
    if ours.events == theirs.events:
        return
    pairs = zip([*ours.events, "nothing"], [*theirs.events, "nothing"], strict=False)
    our_event, their_event = next((a, b) for a, b in pairs if a != b)
    raise DivergenceError(rank, our_event, their_event)


def _compare_messages(rank: int, reports: Sequence[_CaptureReport]) -> None:
    """Require that each captured send has its receive, on all pairs of ranks."""
    for src, dst in itertools.permutations(range(len(reports)), 2):
        sent, received = reports[src].sent.get(dst, []), reports[dst].received.get(src, [])
        if sent == received:
            continue
        sends, receives = f"sends of {sent} bytes", f"receives of {received} bytes"
        if rank == dst:
            raise DivergenceError(src, receives, sends)
        ours = sends if rank == src else f"nothing, and another rank {sends}"
        raise DivergenceError(dst, ours, receives)
