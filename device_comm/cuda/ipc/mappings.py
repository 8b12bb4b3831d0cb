"""Device memory that ranks share: naming it to peers, mapping theirs, and releasing it safely.

Memory is named by a `Shared`: the handle of its allocation and the offset in it. Between ranks that
are threads of one process the plain address is used: a process cannot open its own handles.

Releasing
    Memory that a peer still maps must not be freed. Each rank unmaps everything, sets its word
    in the group's `Departures`, and frees its own memory when all peers have set theirs or have
    died. No collective call is needed. If a peer stays, the memory is freed by the end of the
    process only.

    Memory of torch's allocator, which captured graphs read, is torch's to free. Its owner finds out
    later (`Mappings.gone`), and tells the peers, which unmap it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import msgspec

from shm_broadcast.machine.liveness import ProcessId, ProcessWatch
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.device.driver import Driver
    from shm_broadcast.deadline import Deadline

_FIRST_WORD = 64
"""The offset of the first word of `Departures`, after the segment's header."""

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


class Gone(msgspec.Struct, frozen=True, array_like=True):
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

    def share(self, pointer: int) -> Shared:
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

    def gone(self) -> Gone:
        """Which of the memory that this rank had shared was freed since the last call."""
        allocations = [
            allocation
            for allocation, pointer in self._given.items()
            if self._driver.allocation(pointer) != allocation
        ]
        for allocation in allocations:
            del self._given[allocation]
        return Gone(self._me.pid, self._me.start_time, allocations)

    def forget(self, gone: Gone) -> None:
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


class Departures:
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

    def depart(self) -> None:
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
