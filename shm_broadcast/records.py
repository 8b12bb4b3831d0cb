"""A message cut into records: what goes into each, and where in the ring it may lie.

Pure: nothing here touches shared memory. ``next_record`` in native/long_messages.c does the same.
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


class Place(NamedTuple):
    """Where a record goes: after ``padding`` bytes, ``size`` bytes of payload."""

    padding: int
    size: int

    @property
    def taken(self) -> int:
        """Bytes that it takes."""
        return self.padding + layout.record_stride(self.size)

    @property
    def need(self) -> int:
        """Bytes that must be free for it, room for a CANCEL included."""
        return self.taken + RESERVED_FOR_CANCEL


def place_whole(size: int, to_end: int) -> Place:
    """Where a record of ``size`` payload bytes goes, ``to_end`` bytes before the ring's end."""
    return Place(0 if layout.record_stride(size) <= to_end else to_end, size)


class Body:
    """A message as one run of bytes: the table of its buffers' sizes, the main part, the buffers.

    Attributes:
        parts: these, in order.
        total: their bytes.
        n_buffers: how many buffers there are.
    """

    def __init__(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], placed: Collection[int]
    ) -> None:
        """Take buffers of contiguous bytes; ``placed`` are the indexes of descriptors of blocks."""
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

    def place(self, offset: int, largest: int, to_end: int) -> Place:
        """Where the record goes that begins with byte ``offset``.

        Args:
            offset: 0 for the first, which holds the whole table.
            largest: payload bytes that a record may have; a body of more is split.
            to_end: bytes before the ring's end; a record is split there if that is allowed.
        """
        left = self.total - offset
        if self.total <= largest:
            return place_whole(left, to_end)
        place = place_whole(min(left, largest), to_end)
        first = 1 if offset else 8 * self.n_buffers
        if place.padding and to_end - layout.RECORD_HEADER >= first:
            return Place(0, to_end - layout.RECORD_HEADER)
        return place

    def between(self, start: int, end: int) -> list[memoryview]:
        """The bytes from ``start`` to ``end``, in pieces."""
        pieces: list[memoryview] = []
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._views)):
            view, before = self._views[index], self._starts[index]
            if before >= end:
                break
            if view.nbytes:
                pieces.append(view.cast("B")[max(start - before, 0) : end - before])
        return pieces
