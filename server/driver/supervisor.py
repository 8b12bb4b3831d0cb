"""Watch a pool's workers: read their control channels, and detect the end of each process.

While workers start, the thread that makes the pool calls `Supervisor.step`; after
`Supervisor.start` a separate thread does. It polls a pidfd of each worker, so it detects the end of
a process at once.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from shm_broadcast import MessageDecodeError
from shm_broadcast.deadline import milliseconds
from shm_broadcast.eventcount import WakeFd

from ..control.channel import ChannelClosedError
from ..control.protocol import Detached, FromWorker, Hello, describe

if TYPE_CHECKING:
    from ..launchers.local import WorkerHandle


_log = logging.getLogger(__name__)


class WorkerEvents:
    """Handler of the supervisor's events, called in its thread. This class ignores all events."""

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Handle a worker's message, after its handle has handled `Hello` and `Detached`."""

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Handle a process's end: ``how``, as ``"killed by SIGKILL"``, and its stacks if known."""


class Supervisor:
    """Watches workers, from `start` in ``thread``. Close it, after `stop` if it has a thread."""

    def __init__(self) -> None:
        self._workers: list[WorkerHandle] = []
        self._poll = select.poll()
        self._wake = WakeFd()
        self._poll.register(self._wake, select.POLLIN)
        self._stopping = False
        self.thread: threading.Thread | None = None
        self._watched: set[int] = set()

    def watch(self, worker: WorkerHandle) -> None:
        """Watch another worker; from the supervisor thread, or before `start`."""
        self._workers.append(worker)
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._watched.add(fd)
            self._poll.register(fd, select.POLLIN)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop watching a worker, before it is closed; otherwise like `watch`."""
        self._workers.remove(worker)
        self._ignore(worker.channel.fileno())
        self._ignore(worker.pidfd)

    def is_watched(self, worker: WorkerHandle) -> bool:
        """Return whether further events of ``worker`` are possible: its end was not handled yet."""
        return worker.pidfd in self._watched

    def step(self, watcher: WorkerEvents, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for events, and pass them to ``watcher``."""
        ready = self._poll.poll(milliseconds(timeout))
        fds = {fd for fd, _ in ready}
        if self._wake.fileno() in fds:
            self._wake.clear()
        for worker in tuple(self._workers):
            # Its messages first: a worker reports an exception before it exits.
            if worker.channel.fileno() in fds or worker.pidfd in fds:
                self._read(worker, watcher)
            if worker.pidfd in fds:
                self._ignore(worker.pidfd)
                self._ignore(worker.channel.fileno())
                watcher.on_death(worker.rank, worker.wait(), worker.stack_file.read())

    def start(
        self,
        watcher: WorkerEvents,
        tick: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Watch in a new thread.

        It calls ``tick`` after every event and `wake`, which returns the seconds until its next
        call, and ``failed`` with the exception that ends the thread.
        """
        self.thread = threading.Thread(
            target=self._run, args=(watcher, tick, failed), name="pool-supervisor", daemon=True
        )
        self.thread.start()

    def wake(self) -> None:
        """Have ``tick`` called now; does nothing after `close`."""
        self._wake.notify()

    def stop(self) -> None:
        """Have the thread end soon; idempotent."""
        self._stopping = True
        self.wake()

    def close(self) -> None:
        """Close its descriptors, after its thread has ended; idempotent."""
        self._wake.close()

    def _run(
        self,
        watcher: WorkerEvents,
        tick: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        try:
            while not self._stopping:
                seconds = tick()
                # A restart within `tick` calls `step`, which may have taken `stop`'s wake.
                if not self._stopping:
                    self.step(watcher, seconds)
        except BaseException as error:  # noqa: BLE001 - passed to the pool, which ends
            _log.exception("the thread that watches the workers has failed")
            failed(error)

    def _read(self, worker: WorkerHandle, watcher: WorkerEvents) -> None:
        try:
            while (message := worker.channel.take()) is not None:
                match message:
                    case Hello(pid):
                        worker.pid, worker.connected = pid, True
                    case Detached():
                        worker.detached = True
                watcher.on_message(worker.rank, message)
        except ChannelClosedError:
            self._ignore(worker.channel.fileno())
            worker.kill_if_detached()
        except MessageDecodeError as error:
            self._ignore(worker.channel.fileno())
            # The traceback is this process's, not the worker's.
            watcher.on_message(worker.rank, structs.replace(describe(error), traceback=""))

    def _ignore(self, fd: int) -> None:
        if fd in self._watched:
            self._watched.remove(fd)
            self._poll.unregister(fd)
