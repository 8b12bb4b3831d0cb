"""In which order the device does what one communicator is asked for, whatever the stream.

Collectives of a group follow one another on every rank, so they must never run side by side.
A call on another stream than the last one is put behind that one, by an event. Within a graph
that cannot be done: what a communicator does in one capture has to be on one stream, and calls
on others are refused. When graphs are replayed is not seen here: replay them on the stream that
the other calls are on, or order the streams.

Messages between two ranks may wait long for the other one. In the background they are on
streams of their own, one for each peer and direction, and collectives do not wait for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from device_comm.cuda.driver import Driver, Mark
    from device_comm.cuda.launch import Launch
    from shm_broadcast.deadline import Deadline


class Place(NamedTuple):
    """Where an operation goes.

    Attributes:
        stream: that of the caller.
        captured: into a graph.
    """

    stream: int
    captured: bool


class StreamOrder:
    """Where the operations of one communicator go."""

    def __init__(self, driver: Driver, name: str) -> None:
        """Begin with no stream used; ``name`` is for errors."""
        self._driver = driver
        self._name = name
        self._eager: int | None = None
        self._capture: int | None = None

    def place(self) -> Place:
        """The current stream, ordered behind the last one used.

        Raises:
            ValueError: a capture is on another stream; this call would not be in order with it.
        """
        stream = self._driver.current_stream()
        if self._driver.is_capturing(stream):
            self._refuse_beside(self._capture, stream)
            self._capture = stream
            return Place(stream, True)
        if self._eager is not None and self._eager != stream:
            self._refuse_beside(self._eager, stream)
            self._driver.order(self._eager, stream)
        self._eager = stream
        return Place(stream, False)

    def look(self) -> Place:
        """The current stream, for what needs no order with the rest."""
        stream = self._driver.current_stream()
        return Place(stream, self._driver.is_capturing(stream))

    def marks(self) -> list[Mark]:
        """Behind what the last stream and the current one have been given, graphs included."""
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
    """The streams of messages, and what has to live until these are done with it."""

    def __init__(self, driver: Driver) -> None:
        """Make no stream yet."""
        self._driver = driver
        self._streams: dict[tuple[str, int], int] = {}
        self._under_way: deque[tuple[Mark, object]] = deque()

    def run(
        self, way: tuple[str, int], launches: Sequence[Launch], stream: int, keep: object
    ) -> Passage:
        """Launch behind what ``stream`` has been given, and beside what it will be.

        Args:
            way: a direction and a peer; what has the same is in order.
            launches: what to do.
            stream: the caller's.
            keep: what they use.
        """
        driver = self._driver
        self._forget()
        side = self._streams.get(way)
        if side is None:
            side = self._streams[way] = driver.make_stream()
        driver.order(stream, side)
        for launch in launches:
            driver.launch(*launch, side)
        mark = driver.mark(side)
        self._under_way.append((mark, keep))
        return Passage(driver, self._streams, way, mark)

    def marks(self) -> list[Mark]:
        """Behind everything that is under way."""
        return [mark for mark, _ in self._under_way]

    def close(self) -> None:
        """Give the streams back; nothing is under way any more."""
        self._under_way.clear()
        while self._streams:
            self._driver.free_stream(self._streams.popitem()[1])

    def _forget(self) -> None:
        """Let go of what is done. Ways end in any order, so look at all."""
        still = [entry for entry in self._under_way if not entry[0].passed()]
        self._under_way = deque(still)


class Passage:
    """Operations on a side stream; a `device_comm.work.Pending`."""

    def __init__(
        self,
        driver: Driver,
        streams: Mapping[tuple[str, int], int],
        way: tuple[str, int],
        mark: Mark,
    ) -> None:
        """Follow what the stream of ``way`` has been given until ``mark``."""
        self._driver = driver
        self._streams = streams
        self._way = way
        self._mark = mark

    def ready(self) -> bool:
        """Whether the device has done it."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Let the current stream wait for it; after `SideStreams.close` it is done."""
        side = self._streams.get(self._way)
        if side is not None:
            self._driver.order(side, self._driver.current_stream())


__all__ = ["Passage", "Place", "SideStreams", "StreamOrder"]
