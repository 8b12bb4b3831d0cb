"""The shared memory of a pool on one host: its board, and the flags of cancelled calls.

The driver's place is taken by whoever starts this host's workers. Places of workers on other hosts
stay empty here.

The driver marks a call; a worker may check the mark while it runs the call, which only reads a
word. Calls are numbered in order, and there are about as many words as calls under way: if two
calls share a word, the mark of the earlier one may be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from shm_broadcast import DRIVER_RANK, Board, Segment, SegmentHandle


def create_pool_board(n_workers: int, generation: int, pool: str) -> Board:
    """Make the board for one generation, and take the driver's place, the last one.

    Args:
        n_workers: how many workers the pool has, on all hosts; worker i is member i.
        generation: the generation's number, for whoever looks on.
        pool: its name, likewise; ``""`` if it has none.

    Raises:
        SharedMemoryError: too little memory is free.
    """
    ranks = (*range(n_workers), DRIVER_RANK)
    board = Board.create(n_workers + 1, n_workers, pool or "pool", ranks)
    board.publish_place("generation", generation)
    return board


_WORDS = 64
"""Where the words begin, behind the segment's header."""


class CancellationFlags:
    """The marks of one pool. The driver writes them, workers read them; any thread may.

    Args:
        segment: the memory, owned by this object.
        echo: called with each number that was marked; ``None``: nothing.
    """

    def __init__(self, segment: Segment, echo: Callable[[int], Any] | None = None) -> None:
        self._segment = segment
        self._echo = echo or (lambda _: None)
        self._n_words = (segment.size - _WORDS) // 8

    @classmethod
    def create(cls, in_flight: int, echo: Callable[[int], Any] | None = None) -> CancellationFlags:
        """No call is marked; at most ``in_flight`` of them will be under way at once.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        return cls(Segment.create(_WORDS + 8 * in_flight, "cancelled calls"), echo)

    @classmethod
    def attach(cls, handle: SegmentHandle) -> CancellationFlags:
        """The marks that another process made with `create`.

        Raises:
            SharedMemoryError: its process has ended.
        """
        return cls(Segment.attach(handle))

    def handle(self) -> SegmentHandle:
        """What `attach` needs."""
        return self._segment.handle()

    def mark(self, number: int) -> None:
        """Note that nobody waits for call ``number``, which is under way."""
        self._segment.words.store64(self._word(number), number)
        self._echo(number)

    def __contains__(self, number: int) -> bool:
        """Whether a call under way was marked; 0 is none."""
        return number > 0 and self._segment.words.load64(self._word(number)) == number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._segment.close()

    def _word(self, number: int) -> int:
        return _WORDS + 8 * (number % self._n_words)
