"""Keeps one communicator's operations in order on the device, whatever streams they are called on.

Collectives of a group must run one after the other, in the same order on every rank. A call on
another stream than the last one is made to wait for that one, by an event. During a capture that is
not possible: all operations of a communicator in one capture must be on one stream, and calls on
others are refused. Replays of graphs are not seen here: replay them on the stream of the other
calls, or order the streams yourself.

A message may wait long for the other rank. So background messages run on side streams, one for each
peer and direction, and collectives do not wait for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from device_comm.cuda.device.streams import Passage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.device.driver import Driver, PreparedLaunch
    from device_comm.cuda.device.streams import StreamMark


class StreamPlace(NamedTuple):
    """The stream of an operation.

    Attributes:
        stream: the caller's stream.
        captured: whether it is being captured into a graph.
    """

    stream: int
    captured: bool


class StreamOrder:
    """Orders the operations of one communicator across streams."""

    def __init__(self, driver: Driver, name: str) -> None:
        """Begin with no stream used; ``name`` is for errors."""
        self._driver = driver
        self._name = name
        self._eager: int | None = None
        self._capture: int | None = None

    def place(self) -> StreamPlace:
        """The current stream, after having it wait for the last one used.

        Raises:
            ValueError: another stream is being captured; this call could not be ordered with it.
        """
        stream = self._driver.current_stream()
        if self._driver.is_capturing(stream):
            self._refuse_beside(self._capture, stream)
            self._capture = stream
            return StreamPlace(stream, True)
        if self._eager is not None and self._eager != stream:
            self._refuse_beside(self._eager, stream)
            self._driver.order(self._eager, stream)
        self._eager = stream
        return StreamPlace(stream, False)

    def look(self) -> StreamPlace:
        """The current stream, for an operation that need not wait for the others."""
        stream = self._driver.current_stream()
        return StreamPlace(stream, self._driver.is_capturing(stream))

    def marks(self) -> list[StreamMark]:
        """The ends of all work on the last stream used and on the current one, replays included."""
        streams = {self._driver.current_stream()}
        if self._eager is not None:
            streams.add(self._eager)
        return [self._driver.mark(each) for each in streams if not self._driver.is_capturing(each)]

    def _refuse_beside(self, other: int | None, stream: int) -> None:
        if other is not None and other != stream and self._driver.is_capturing(other):
            raise ValueError(
                f"{self._name}: a capture is under way on stream {other:#x}; its operations "
                f"cannot be ordered with one on stream {stream:#x}: use the capture's own"
            )


class SideStreams:
    """The side streams of messages; keeps what the messages use alive until they are done."""

    def __init__(self, driver: Driver) -> None:
        """Make no stream yet."""
        self._driver = driver
        self._streams: dict[tuple[str, int], int] = {}
        self._under_way: deque[tuple[StreamMark, object]] = deque()

    def run(
        self, way: tuple[str, int], launches: Sequence[PreparedLaunch], stream: int, keep: object
    ) -> Passage:
        """Launch on a side stream, after all work that is on ``stream`` now.

        Args:
            way: (direction, peer); launches with the same way run in order, on the same stream.
            launches: what to launch.
            stream: the caller's stream.
            keep: an object to keep alive until the kernels are done.
        """
        driver = self._driver
        self._forget()
        side = self._streams.get(way)
        if side is None:
            side = self._streams[way] = driver.make_stream()
        driver.order(stream, side)
        for launch in launches:
            launch(side)
        mark = driver.mark(side)
        self._under_way.append((mark, keep))
        return Passage(mark)

    def marks(self) -> list[StreamMark]:
        """The ends of all unfinished messages."""
        return [mark for mark, _ in self._under_way]

    def close(self) -> None:
        """Destroy the streams; all messages must be done."""
        self._under_way.clear()
        while self._streams:
            self._driver.free_stream(self._streams.popitem()[1])

    def _forget(self) -> None:
        """Drop finished messages; those of different ways may end in any order."""
        still = [entry for entry in self._under_way if not entry[0].passed()]
        self._under_way = deque(still)
