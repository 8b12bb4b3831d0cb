"""uvicorn, ended by signals as this service wants it.

The first SIGTERM or SIGINT: refuse new connections, finish what was accepted. The second, whichever
of them: give up what is unfinished. uvicorn alone hears a second SIGINT only, drops connections
without an answer, and raises the signals once more when it has ended in order.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WebServer(uvicorn.Server):
    """A server that hears signals from `hear_signals` on, also before it runs.

    Attributes:
        heard: the signals that came.

    Args:
        config: uvicorn's.
        give_up: called at the second signal, in the main thread, between any two instructions.
    """

    def __init__(self, config: uvicorn.Config, give_up: Callable[[], None]) -> None:
        super().__init__(config)
        self.heard: list[int] = []
        self._give_up = give_up

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Take a signal."""
        self.heard.append(sig)
        self.should_exit = True
        if len(self.heard) == 2:
            self._give_up()

    @contextmanager
    def hear_signals(self) -> Iterator[None]:
        """Handle signals in this block; in the main thread only.

        Once one was heard, later ones are ignored: the process ends, and with its own exit status.
        """
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.heard else handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are, in place of uvicorn's own handling."""
        yield
