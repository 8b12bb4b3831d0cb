"""The shared memory of a pool on one host: its board, and the flags of cancelled calls.

The process that starts this host's workers is the board's last member. Members for workers on other
hosts stay unused.

The driver sets a call's flag, a 64-bit word with the call's number; a worker polls it during the
call. There are as many words as calls in flight: if two calls share a word, the earlier flag may be
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from shm_broadcast import DRIVER_RANK, Board, Segment, SegmentHandle


def create_pool_board(n_workers: int, generation: int, pool: str) -> Board:
    """Create the board of one generation, and become its last member.

    Worker i, on any host, is member i. ``generation`` and the name ``pool`` are for inspection.
    """
    ranks = (*range(n_workers), DRIVER_RANK)
    board = Board.create(n_workers + 1, n_workers, pool or "pool", ranks)
    board.publish_place("generation", generation)
    return board


_WORDS = 64
"""The offset of the words, after the segment's header."""


class CancellationFlags:
    """The flags of one pool, in ``segment``, which it owns. Any thread may use them.

    The driver writes them, workers read them. ``echo`` is called with each marked number.
    """

    def __init__(self, segment: Segment, echo: Callable[[int], Any] | None = None) -> None:
        self._segment = segment
        self._echo = echo or (lambda _: None)
        self._n_words = (segment.size - _WORDS) // 8

    @classmethod
    def create(cls, in_flight: int, echo: Callable[[int], Any] | None = None) -> CancellationFlags:
        """Create cleared flags for ``in_flight`` calls, or raise `SharedMemoryError`."""
        return cls(Segment.create(_WORDS + 8 * in_flight, "cancelled calls"), echo)

    @classmethod
    def attach(cls, handle: SegmentHandle) -> CancellationFlags:
        """Map the flags of another process, or raise `SharedMemoryError` if that has ended."""
        return cls(Segment.attach(handle))

    def handle(self) -> SegmentHandle:
        """Return the argument of `attach`."""
        return self._segment.handle()

    def mark(self, number: int) -> None:
        """Set the flag of call ``number``, which is in flight and has lost its caller."""
        self._segment.words.store64(self._word(number), number)
        self._echo(number)

    def __contains__(self, number: int) -> bool:
        """Return whether the flag of a call in flight is set; 0 is no call."""
        return number > 0 and self._segment.words.load64(self._word(number)) == number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._segment.close()

    def _word(self, number: int) -> int:
        return _WORDS + 8 * (number % self._n_words)
