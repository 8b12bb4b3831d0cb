"""Processes that are ranks: asked the same, they answer; asked for nothing, they end."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class RankProcesses:
    """Processes that each run ``serve(rank, *arguments, pipe)``. Use it in a ``with`` block."""

    def __init__(self, n: int, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, *arguments, theirs), daemon=True)
            process.start()
            theirs.close()  # so that one which fails ends the wait for its answer
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *request: Any) -> Any:
        """Rank 0's answer; all ranks have answered then."""
        for pipe in self._pipes:
            pipe.send(request)
        first, *_ = [pipe.recv() for pipe in self._pipes]
        return first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(10)
