"""A peer for tests: a system of this process that gives back what it is sent."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.queue_base import System, obey_input


class Echoes(System):
    """Its payloads come back; its name says how it fails, if it does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, n_readers: int) -> None:
        self._n = n_readers
        self._rests = True

    def resume(self) -> None:
        if not self._rests:
            raise RuntimeError("it has not been let rest")
        self._rests = False

    def rest(self) -> None:
        self._rests = True

    def send(self, command: str, payload: Any) -> None:  # noqa: ARG002 - one thing only
        if self._rests:
            raise RuntimeError("it rests")
        if self.name == "fails":
            raise LookupError("no such thing")
        if self.name == "hangs":
            time.sleep(3600)
        self._payload = payload

    def replies(self) -> list[Any]:
        return [self._payload] * self._n

    def stop(self) -> None:
        """Nothing runs."""


if __name__ == "__main__":
    obey_input(Echoes)
