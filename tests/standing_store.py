"""A store in a process of its own, which can stand still as in a debugger."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator import host_store
from tests.patience import until
from tests.ranks import CONTEXT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class StandingStore:
    port: int
    pid: int

    def stop(self) -> None:
        """Return when all its threads stand still: the one that answers may be the last."""
        os.kill(self.pid, signal.SIGSTOP)
        until(self._stands)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _stands(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(each.read_text().rpartition(") ")[2][0] == "T" for each in threads)


def _host(told: Connection) -> None:
    store = host_store()
    told.send(store.port)
    time.sleep(1000)


@contextmanager
def store_elsewhere() -> Iterator[StandingStore]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_host, args=(theirs,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield StandingStore(ours.recv(), process.pid)
    finally:
        process.kill()
        process.join()
        process.close()
