"""Threads for calls that block and that nothing can interrupt.

Whoever needs the result waits for `Job.done`, with a deadline and an eye on its peers, and
walks away if it must: the thread, and all that the call uses, then stay as they are until
the call returns by itself. Threads are daemons: none holds up the end of the process.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_IDLE_SECONDS = 10.0
"""How long a thread without work stays."""


class Job:
    """One call. ``error`` is what it raised, once it is ``done``."""

    def __init__(self, call: Callable[[], object], wake: Callable[[], None]) -> None:
        self._call: Callable[[], object] | None = call
        self._wake = wake
        self.done = False
        self.error: Exception | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Call, and wake whoever waits."""
        if self._call is not None:
            try:
                self._call()
            except Exception as error:  # noqa: BLE001 - raised where the job is waited for
                self.error = error
        self._call = None
        self.done = True
        self._ended.set()
        self._wake()
        del self  # its error holds this frame

    def join(self) -> None:
        """Return once it is done, on another helper thread.

        Raises:
            Exception: what it raised.
        """
        self._ended.wait()
        if self.error is not None:
            raise self.error


class HelperThreads:
    """As many threads as there are calls under way; a free one is used again."""

    def __init__(self, name: str) -> None:
        """Start none yet.

        Args:
            name: what the threads are called.
        """
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._closed = False

    def start(self, call: Callable[[], object], wake: Callable[[], None]) -> Job:
        """Run ``call`` on a thread, then ``wake()`` there."""
        job = Job(call, wake)
        with self._lock:
            spare = self._free > 0
            if spare:
                self._free -= 1
        if not spare:  # first: a job that no thread takes would be the next one's
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the threads: the free ones now, the others after their calls."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, 0
        for _ in range(free):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:  # a job, or the end, is on its way to this thread
                        continue
                    self._free -= 1
                return
            if job is None:
                return
            job.run()
            del job
            with self._lock:
                if self._closed:
                    return
                self._free += 1
