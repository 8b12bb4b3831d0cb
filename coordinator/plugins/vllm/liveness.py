"""A killed worker ends the engine at once, and the engine says which worker and how it ended."""

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
    """An exit code of `multiprocessing` in words."""
    if exitcode is None:
        return "has ended"
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def start_worker_monitor(self: Any, inline: bool = False) -> None:
    """In the place of vLLM's method: wait for the first worker that ends, and end the engine.

    vLLM's gives the other workers 5 s to leave the collectives that they can never leave, and then
    4 s more, before it tells anybody.
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
    # Nothing can be finished without it, and who waits for it in one of vLLM's own collectives
    # does not hear of anything: the others end now.
    for each in workers:
        each.proc.kill()
    engine.shutdown()
    callback, engine.failure_callback = engine.failure_callback, None
    if callback is not None:
        callback()
