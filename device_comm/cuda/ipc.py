"""Device memory that ranks lend each other: naming it, mapping it, and letting go in order.

Memory travels as a `Shared`: the handle of its allocation and the offset within, or, between
ranks that are threads of one process, the bare address: a process cannot open its own handles.

Letting go
    What a peer still maps must not be freed. Each rank unmaps everything, says so in a word of
    the group's `Departures`, and frees its own memory once all peers have said so or have
    died. That takes no collective call. A peer that stays keeps the memory; then it is left to
    the end of the process.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import msgspec

from shm_broadcast.liveness import ProcessId, ProcessWatch
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.driver import Driver
    from shm_broadcast.deadline import Deadline

_FIRST_WORD = 64
"""Where the words of `Departures` begin, behind the segment's header."""

_NAP = 0.001
"""Seconds between two looks at who has departed."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Device memory of one rank, for its peers.

    Attributes:
        pid: the process that has it.
        start_time: of that process; see `ProcessId`.
        device: the `Driver.identity` of where it is.
        pointer: its address in that process.
        handle: for other processes; see `Exported`.
        offset: likewise.
    """

    pid: int
    start_time: int
    device: str
    pointer: int
    handle: bytes
    offset: int


class Mappings:
    """What one rank lends and borrows. Every allocation is mapped once, until `close`."""

    def __init__(self, driver: Driver) -> None:
        """Begin with nothing."""
        self._driver = driver
        self._me = ProcessId.current()
        self._bases: dict[tuple[int, int, bytes], int] = {}
        self._reached = {driver.identity}

    def share(self, pointer: int) -> Shared:
        """Name memory of this rank.

        Raises:
            NotShareableError: it cannot be shared; says why.
        """
        exported = self._driver.export(pointer)
        return Shared(
            self._me.pid,
            self._me.start_time,
            self._driver.identity,
            pointer,
            exported.handle,
            exported.offset,
        )

    def address(self, shared: Shared) -> int:
        """Where memory of a peer is here.

        Raises:
            DeviceError: it cannot be mapped.
        """
        if (shared.pid, shared.start_time) == (self._me.pid, self._me.start_time):
            if shared.device not in self._reached:
                self._driver.reach(shared.device)
                self._reached.add(shared.device)
            return shared.pointer
        key = (shared.pid, shared.start_time, shared.handle)
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self._driver.map(shared.handle)
        return base + shared.offset

    def close(self) -> None:
        """Unmap everything."""
        while self._bases:
            self._driver.unmap(self._bases.popitem()[1])


class Departures:
    """Who of a group has unmapped everything: a word for each rank, in shared host memory."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Look at ``segment`` as ``rank``; it is closed with this."""
        self._segment = segment
        self._rank = rank

    @classmethod
    def create(cls, rank: int) -> Self:
        """New words, of which this rank tells the others the `handle`."""
        return cls(Segment.create(1, "ipc-departures"), rank)

    @classmethod
    def attach(cls, handle: SegmentHandle, rank: int) -> Self:
        """The words that another rank has made.

        Raises:
            SharedMemoryError: its owner has gone.
        """
        return cls(Segment.attach(handle), rank)

    def handle(self) -> SegmentHandle:
        """For `attach`."""
        return self._segment.handle()

    def depart(self) -> None:
        """Say that this rank maps nothing any more."""
        self._segment.words.store32(_FIRST_WORD + 4 * self._rank, 1)

    def wait(self, peers: Sequence[tuple[int, ProcessId]], deadline: Deadline) -> bool:
        """Wait until these ranks have departed or died; whether they have, by the deadline."""
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
        """Give the words up."""
        self._segment.close()

    def _gone(self, rank: int, watch: ProcessWatch) -> bool:
        return bool(self._segment.words.load32(_FIRST_WORD + 4 * rank)) or not watch.alive()


__all__ = ["Departures", "Mappings", "Shared"]
