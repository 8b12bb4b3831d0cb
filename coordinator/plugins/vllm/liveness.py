"""End the engine as soon as a worker dies, and report the worker and its exit."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from vllm.logger import init_logger

from coordinator.plugins.vllm import hooks

logger = init_logger("vllm.group_coordinator")


def how_it_ended(exitcode: int | None) -> str:
    """Describe an exit code of `multiprocessing`."""
    if exitcode is None:
        return "has ended"
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def start_worker_monitor(self: Any, inline: bool = False) -> None:
    """Wait for the first worker that exits, and end the engine: replaces vLLM's method.

    vLLM waits 5 s for the other workers, blocked in collectives, and 4 s more before it reports.
    """
    if inline:
        _watch(weakref.ref(self), self.workers)
    else:
        threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self.workers),
            daemon=True,
            name="MultiprocWorkerMonitor",
        ).start()


def _watch(executor: weakref.ref[Any], workers: Sequence[Any]) -> None:
    ended = wait([each.proc.sentinel for each in workers])
    engine = executor()
    if engine is None or getattr(engine, "shutting_down", False):
        return
    engine.is_failed = True
    first = next(each for each in workers if each.proc.sentinel == ended[0])
    first.proc.join()
    words = f"worker rank {first.rank} (pid {first.proc.pid}) {how_it_ended(first.proc.exitcode)}"
    hooks.report_end(end=words)
    logger.error("%s: ending the engine.", words)
    # The other workers cannot finish, and vLLM's own collectives would block them: kill them.
    for each in workers:
        each.proc.kill()
    engine.shutdown()
    callback, engine.failure_callback = engine.failure_callback, None
    if callback is not None:
        callback()
