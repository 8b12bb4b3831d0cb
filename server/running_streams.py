"""The worker's end of streams: the generators that the worker's methods have returned."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import StreamLostError

if TYPE_CHECKING:
    from .control.protocol import Call

    Running: TypeAlias = Generator[Any, None, Any]


class RunningStreams:
    """Runs generators an item at a time, as `control.protocol.Call.stream` says.

    Args:
        worker: the user's worker.
    """

    def __init__(self, worker: object) -> None:
        self._worker = worker
        self._running: dict[int, Running] = {}

    def step(self, call: Call, wanted: bool) -> tuple[Any, ...] | None:
        """Run a call that belongs to a stream.

        Args:
            call: the call.
            wanted: whether the driver wants this rank's item.

        Returns:
            ``(item,)``, where the item is ``None`` if it is not wanted; ``()`` at the end;
            ``None`` if the call closes the stream.

        Raises:
            StreamLostError: the stream began before the pool was restarted.
            TypeError: the method returned something else than a generator.
            What the generator raises.
        """
        if call.stream < 0:
            self._running.pop(-call.stream, _ended()).close()
            return None
        if call.begins:
            # If the method raises, the stream has ended on this rank; the driver closes it.
            self._running[call.stream] = _ended()
            self._running[call.stream] = self._begin(call)
        elif call.stream not in self._running:
            raise StreamLostError(call.method)
        for item in self._running[call.stream]:
            return (item if wanted else None,)
        return ()

    def _begin(self, call: Call) -> Running:
        made = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        if not isinstance(made, Generator):
            raise TypeError(f"{call.method} is not a generator: it returned {type(made).__name__}")
        return made


def _ended() -> Running:
    yield from ()
