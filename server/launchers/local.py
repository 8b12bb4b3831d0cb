"""Workers as processes of this host, each in a session of its own.

A session of its own means: what a terminal sends (an interrupt, a hang-up) reaches the driver, who
ends the workers in order; and whatever a worker has started goes with it.

Every worker holds three descriptors from its driver: the control channel, the lifeline and the
file for its stack. See `server.launchers.boot` for what it does with them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from server.channel import Channel, ChannelClosedError
from server.launchers.boot import STACK_SIGNAL
from server.messages import FromWorker
from server.stacks import StackFile
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server.messages import Start

_BOOT = Path(__file__).with_name("boot.py")


class LocalWorker:
    """One worker's process, as its driver sees it.

    Attributes:
        rank: its global rank.
        pid: its process id, also of its process group and its session.
        channel: the driver's end of its control channel.
        stack_file: where it writes its stack.
    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start the process; `start` it next."""
        self.rank = rank
        self._closed = False
        self._closing = threading.Lock()
        with ExitStack() as ours, ExitStack() as theirs:
            connection, control = socket.socketpair()
            theirs.callback(control.close)
            self.channel = Channel(connection, FromWorker)
            ours.callback(self.channel.close)
            beat, lifeline = os.pipe()
            theirs.callback(os.close, beat)
            ours.callback(os.close, lifeline)
            self.stack_file = StackFile()
            ours.callback(self.stack_file.close)
            inherited = (control.fileno(), beat, self.stack_file.fd)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_BOOT), *map(str, inherited), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=inherited,
                start_new_session=True,
            )
            self.pid = self._process.pid
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
            ours.callback(os.close, self.pidfd)
            self._ours = ours.pop_all()

    def start(self, start: Start, deadline: Deadline) -> None:
        """Say what to be. A process that has ended meanwhile is left to whoever watches it.

        Raises:
            GroupTimeoutError: it does not take it in.
        """
        try:
            self.channel.send(list(map(str, sys.path)), deadline)
            self.channel.send(start, deadline)
        except ChannelClosedError:
            return

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether the process ends within ``timeout`` seconds."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._closing, suppress(ProcessLookupError):
            if not self._closed:
                signal.pidfd_send_signal(self.pidfd, number)

    def ask_stack(self) -> None:
        """Let it write its stack into `stack_file`; only after it has said `Hello`."""
        self.signal(STACK_SIGNAL)

    def bury(self) -> str:
        """Take in the exit status of a process that has ended, and end what it has started.

        Returns:
            How it ended, such as ``"killed by SIGKILL"`` or ``"exit status 1"``.
        """
        if self._process.returncode is None:
            # The process group exists as long as its leader has not been waited for.
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """Give up all descriptors, after `bury`; idempotent, from any thread."""
        with self._closing:
            self._closed = True
            self._ours.close()


def launch(n_workers: int) -> list[LocalWorker]:
    """Start ``n_workers`` processes, of rank 0 and up. End them with `end`.

    Raises:
        OSError: a process cannot be started; those that were are ended.
    """
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(max(1, cores // n_workers)), **os.environ}
    workers: list[LocalWorker] = []
    try:
        for rank in range(n_workers):
            workers.append(LocalWorker(rank, environment))  # noqa: PERF401
    except BaseException:
        end(workers, 0.0, 0.0)
        for worker in workers:
            worker.close()
        raise
    return workers


def end(workers: Sequence[LocalWorker], stop_seconds: float, kill_seconds: float) -> None:
    """See that no process of ``workers`` is left; idempotent.

    Args:
        workers: all of a pool's; those that are to end by themselves were told so before.
        stop_seconds: how long to wait before SIGTERM.
        kill_seconds: how long to wait from there to SIGKILL.
    """
    for seconds, number in ((stop_seconds, signal.SIGTERM), (kill_seconds, signal.SIGKILL)):
        deadline = Deadline.after(seconds)
        for worker in workers:
            if not worker.ended(deadline.remaining()):
                worker.signal(number)
    for worker in workers:
        worker.bury()
