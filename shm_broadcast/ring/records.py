"""Cuts a message into records and decides where in the ring each of them goes.

Pure arithmetic: nothing here touches shared memory. ``next_record`` in native/long_messages.c does
the same in C.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from shm_broadcast import layout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from typing_extensions import Buffer

RESERVED_FOR_CANCEL: Final = layout.RECORD_ALIGN
"""Bytes that every record leaves free behind it.

A writer that gives a message up must be able to say so at once, even to readers that are stuck.
"""


class RecordPlace(NamedTuple):
    """Where a record goes: ``padding`` bytes are skipped, then it has ``size`` bytes of payload."""

    padding: int
    size: int

    @property
    def taken(self) -> int:
        """Bytes of the ring that the padding, the record's header and its payload take."""
        return self.padding + layout.record_stride(self.size)

    @property
    def need(self) -> int:
        """Bytes that must be free before it is written: `taken`, and room for a CANCEL."""
        return self.taken + RESERVED_FOR_CANCEL


def place_whole(size: int, to_end: int) -> RecordPlace:
    """Where an unsplit record of ``size`` payload bytes goes.

    Args:
        size: bytes of payload.
        to_end: bytes from the next free position to the ring's end, where positions wrap. A record
            that does not fit before the end is put at the ring's start, behind padding.
    """
    return RecordPlace(0 if layout.record_stride(size) <= to_end else to_end, size)


class Body:
    """A message as one run of bytes: the table of its buffers' sizes, the main part, the buffers.

    Attributes:
        parts: the table, the main part's pieces and the buffers, in this order.
        total: their bytes, all together.
        n_buffers: how many out-of-band buffers there are.
    """

    def __init__(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], placed: Collection[int]
    ) -> None:
        """Nothing is copied: the parts stay the caller's memory.

        Args:
            main: the main part, in contiguous pieces.
            buffers: out-of-band buffers of contiguous bytes.
            placed: the indexes of those ``buffers`` that are descriptors of blocks.
        """
        sizes = (
            buffer.nbytes | layout.PLACED * (index in placed)
            for index, buffer in enumerate(buffers)
        )
        self.n_buffers = len(buffers)
        self.parts = (struct.pack(f"<{len(buffers)}Q", *sizes), *main, *buffers)
        self._views = [memoryview(part) for part in self.parts]
        ends = itertools.accumulate(view.nbytes for view in self._views)
        self._starts = [0, *ends]
        self.total = self._starts.pop()

    def place(self, offset: int, largest: int, to_end: int) -> RecordPlace:
        """Where the record goes whose payload begins with byte ``offset`` of this body.

        Args:
            offset: 0 for the first record, which must hold the whole table of sizes.
            largest: the most payload bytes of a record; a larger body is split into several.
            to_end: bytes to the ring's end. A record of a split body is cut short there rather than
                moved behind padding.
        """
        left = self.total - offset
        if self.total <= largest:
            return place_whole(left, to_end)
        place = place_whole(min(left, largest), to_end)
        first = 1 if offset else 8 * self.n_buffers
        if place.padding and to_end - layout.RECORD_HEADER >= first:
            return RecordPlace(0, to_end - layout.RECORD_HEADER)
        return place

    def between(self, start: int, end: int) -> list[memoryview]:
        """Views of the body's bytes from ``start`` up to ``end``, in order."""
        pieces: list[memoryview] = []
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._views)):
            view, before = self._views[index], self._starts[index]
            if before >= end:
                break
            if view.nbytes:
                pieces.append(view.cast("B")[max(start - before, 0) : end - before])
        return pieces
