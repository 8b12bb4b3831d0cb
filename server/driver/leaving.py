"""Waits until the workers of a broken pool have left what they did, or have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..control.protocol import Left

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shm_broadcast import Deadline

    from ..control.protocol import FromWorker
    from ..launchers.worker_handle import WorkerHandle
    from .supervisor import Supervisor


class Leaving:
    """The supervisor's watcher meanwhile.

    Args:
        workers: all workers of the pool.
    """

    def __init__(self, workers: Collection[WorkerHandle]) -> None:
        self._workers = {worker.rank: worker for worker in workers}

    def wait(self, supervisor: Supervisor, deadline: Deadline, tick: Callable[[], float]) -> None:
        """Wait until each worker has left or ended, or until the deadline.

        Args:
            supervisor: watches the workers.
            deadline: when to return.
            tick: called again and again; returns the seconds until its next call.
        """
        while not deadline.expired and any(
            not (worker.away or worker.ended()) for worker in self._workers.values()
        ):
            supervisor.step(self, min(deadline.remaining(), tick()))

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Note that a worker has left; called by the supervisor."""
        if isinstance(message, Left):
            self._workers[rank].away = True

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Do nothing: `wait` sees that the process has ended."""
