"""Processes that are ranks: asked the same, they answer; asked for nothing, they end."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from server.launchers.boot import kill_at_close

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


def _be(serve: Callable[..., None], lifeline: Connection, *arguments: Any) -> None:
    # Some peers' ranks spin without end for one that is gone, and run no Python meanwhile.
    kill_at_close(lifeline.fileno(), os.getpid())
    serve(*arguments)


def tie(rank: int, n: int) -> None:
    """Have this rank run on a core of its own, as MPIs do by default, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if n <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


class RankProcesses:
    """Processes that each run ``serve(rank, *arguments, pipe)``. Use it in a ``with`` block."""

    def __init__(self, n: int, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        # Each rank runs the main module anew: what that imports is there by then.
        imported = [name for name in sys.modules if name.startswith("benchmarks.")]
        context.set_forkserver_preload(["torch", *imported])
        self._pipes, self._lifelines, self._processes = [], [], []
        for rank in range(n):
            ours, theirs = context.Pipe()
            watched, lifeline = context.Pipe(duplex=False)
            self._lifelines.append(lifeline)  # closed with this process, however it ends
            process = context.Process(
                target=_be, args=(serve, watched, rank, *arguments, theirs), daemon=True
            )
            process.start()
            watched.close()
            theirs.close()  # so that one which fails ends the wait for its answer
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *request: Any) -> Any:
        """Rank 0's answer; all ranks have answered then."""
        return self.ask_all(*request)[0]

    def ask_all(self, *request: Any) -> list[Any]:
        """The answers of all ranks, by rank."""
        for pipe in self._pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self._pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):  # it fails
                    pipe.send(None)
        for process in self._processes:
            process.join(10)
