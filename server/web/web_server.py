"""uvicorn, with an orderly end at the first signal and a quick one at the second.

At the first SIGTERM, SIGINT or SIGHUP it refuses new connections and finishes accepted requests. At
a second one, or after the drain timeout, it abandons unfinished requests. Plain uvicorn reacts only
to a second SIGINT, drops connections without an answer, is killed by SIGHUP, and raises the signals
again after an orderly end.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from .listener import BACKLOG

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WebServer(uvicorn.Server):
    """A server that hears signals from `hear_signals` on, also before it runs.

    Attributes:
        heard: the signals that came.
        gave_up: whether what was unfinished was given up.

    Args:
        config: uvicorn's.
        give_up: called once to give up what is unfinished, in the main thread, between any two
            instructions; it must call its argument after clients have had time to read of it.
        leave: called when it begins to finish: ends the answers that have no end of their own.
        drain_seconds: how long it may take from the first signal to finish what was accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        give_up: Callable[[Callable[[], None]], None],
        leave: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self.heard: list[int] = []
        self.gave_up = False
        self._give_up = give_up
        self._leave = leave
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Take a signal."""
        self.heard.append(sig)
        self.should_exit = True
        if len(self.heard) == 2:
            self._give_up_now()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; what cannot be accepted yet waits in the queue that `listen` gave.

        asyncio shortens it to ``config.backlog``, which is how many it accepts at a time.
        """
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what was accepted; after ``drain_seconds`` give it up."""
        self._leave()
        over = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up_now)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()

    @contextmanager
    def hear_signals(self) -> Iterator[None]:
        """Handle signals in this block; in the main thread only.

        A hang-up that is ignored, as under nohup, stays so. Once a signal was heard, later ones are
        ignored: the process ends, and with its own exit status.
        """
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.heard else handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are; uvicorn would take them over here."""
        yield

    def _give_up_now(self) -> None:
        if not self.gave_up:
            self.gave_up = True
            self._give_up(self._drop_connections)

    def _drop_connections(self) -> None:
        self.force_exit = True
