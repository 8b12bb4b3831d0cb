"""Start workers as processes of this host, each in a session of its own, and end them.

In its own session a worker does not get the terminal's signals (Ctrl-C, hang-up): the driver gets
them, and ends the workers in order. Between the driver and each worker runs the worker's keeper, a
process that only sees to it that everything that the worker has started ends with it.

A worker inherits four descriptors: the control channel, its seat in the meeting, the lifeline and
the file for its stack. `launchers.boot` says what it does with them.

The keeper is a child of the driver, however it was started: forked by a process that has loaded
torch (`launchers.fork_servers`), or spawned, as a fresh interpreter.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from shm_broadcast import Deadline, GroupTimeoutError
from shm_broadcast.cpu import memory_kills
from shm_broadcast.deadline import milliseconds
from shm_broadcast.process import is_ending, system_call
from shm_broadcast.state.stacks import STACK_SIGNAL, StackFile, read_stacks

from ..control.channel import Channel, ChannelClosedError
from ..control.protocol import FromWorker, Resume, Start
from ..errors import WorkerStartError
from .boot import END_SIGNAL
from .fork_servers import (
    FORK_SERVERS,
    ChildProcess,
    python_command,
    worker_environment,
    working_folder,
)


class WorkerChannel(Protocol):
    """The driver's end of a control channel; see `control.channel.Channel`."""

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something to give, or to raise."""

    def send(self, message: Start | Resume, deadline: Deadline = ...) -> None:
        """Send a message."""

    def take(self) -> FromWorker | None:
        """The next message if it has arrived, else ``None``. Raises `ChannelClosedError`."""


class WorkerHandle(Protocol):
    """A worker's process: `local.LocalWorker` here, `remote_hosts.RemoteWorker` elsewhere.

    Attributes:
        rank: the worker's global rank.
        pid: its process id.
        connected: whether its `Hello` has come: it can show its stack.
        detached: whether its `Left` has come: it waits for `start`.
    """

    rank: int
    pid: int
    connected: bool
    detached: bool

    @property
    def channel(self) -> WorkerChannel:
        """The driver's end of the control channel."""

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable when the process has ended."""

    @property
    def stack_file(self) -> StackFile:
        """Where the worker's stack comes."""

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message. Does nothing if the process has ended."""

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process has ended; False after ``timeout`` seconds."""

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL`, unless it has ended.

        The last has its stack come into `stack_file`, and is for a worker whose `Hello` has come.
        """

    def kill_if_detached(self) -> None:
        """End the process, whose end of the control channel is closed, unless it ends by itself."""

    def wait(self) -> str:
        """Wait for a process that has ended, or was killed; how it ended."""

    def close(self) -> None:
        """Close all descriptors, after `wait`; idempotent, from any thread."""


_ENDING_SECONDS = 0.5
"""How long an ordinary end may take after descriptors are closed; sandboxes may not show it."""
_KEEPER_SECONDS = 4.0
"""How long a keeper may take to end what its worker has left."""
_BOOT = Path(__file__).with_name("boot.py")
_PACKAGE = __name__.partition(".")[0]


class LocalWorker:
    """The driver's handle of one worker's process and its keeper; see `WorkerHandle`.

    Attributes:
        pid: the worker's process id, which is also the id of its process group and session; until
            its `Hello` has come, the keeper's.
        pidfd: a descriptor of the keeper's process, which ends after the worker.
    """

    def __init__(
        self, rank: int, seat: socket.socket, begin: Callable[[Sequence[int]], ChildProcess]
    ) -> None:
        """Start the process, with ``seat`` to inherit; `start` tells it what to be.

        Args:
            rank: its global rank.
            seat: its end of the meeting.
            begin: starts the process with the descriptors that it is to inherit.
        """
        self.rank = rank
        self.connected = self.detached = False
        self._told_path = False
        self._cut_off = ""
        self._memory_kills_before = memory_kills()
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close it, too
        with ExitStack() as ours, ExitStack() as theirs:
            connection, control = socket.socketpair()
            theirs.callback(control.close)
            self.channel = Channel(connection, FromWorker)
            ours.callback(self.channel.close)
            heartbeat, lifeline = os.pipe()
            theirs.callback(os.close, heartbeat)
            self._lifeline = ours.enter_context(ExitStack())
            self._lifeline.callback(os.close, lifeline)
            self.stack_file = StackFile()
            ours.callback(self.stack_file.close)
            inherited = (control.fileno(), seat.fileno(), heartbeat, self.stack_file.fd)
            self._process = begin(inherited)
            self.pid = self._process.pid
            try:
                with system_call("pidfd_open"):
                    self.pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
            ours.callback(os.close, self.pidfd)
            self._ours = ours.pop_all()

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message, before the first one also the driver's ``sys.path``.

        Does nothing if the process has ended: whoever watches it reports that.

        Raises:
            GroupTimeoutError: the process does not read them in time.
        """
        try:
            self.detached = False
            if not self._told_path:
                self._told_path = True
                # By Python's JSON: a folder's name may hold bytes that are no text.
                self.channel.send(
                    msgspec.Raw(json.dumps(list(map(str, sys.path))).encode()), deadline
                )
            self.channel.send(start, deadline)
        except ChannelClosedError:
            return

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process and its keeper have ended; False after ``timeout`` seconds."""
        if self._closed:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(milliseconds(timeout)))

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL` to the worker, unless it has ended.

        If this process has changed its user since the start, only SIGKILL arrives.
        """
        with self._closing, suppress(ProcessLookupError):
            if not self._closed:
                # To the keeper, which passes it on: it is the worker's parent, so for it the
                # worker's pid cannot be reused. SIGKILL would end the keeper instead.
                passed = END_SIGNAL if number == signal.SIGKILL else number
                try:
                    signal.pidfd_send_signal(self.pidfd, passed)
                except PermissionError:
                    if number == signal.SIGKILL:
                        self._lifeline.close()  # the kernel kills it then

    def kill_if_detached(self) -> None:
        """End the process, whose end of the control channel is closed, unless it ends by itself.

        A worker keeps its end until its process ends (`worker.main`), so it is no worker any more.
        """
        if not self.connected or is_ending(self.pid) or self.ended(_ENDING_SECONDS):
            return
        program: object = "what may not be looked at"
        with suppress(OSError):
            program = Path(f"/proc/{self.pid}/exe").readlink()
        self._cut_off = (
            "it became another program (exec), or closed its descriptors, and was ended; "
            f"it ran {program}"
        )
        self.signal(signal.SIGKILL)

    def wait(self) -> str:
        """Wait for a process that has ended, or was killed, and return its exit status.

        Returns:
            How it ended, such as ``"killed by SIGKILL"`` or ``"exit status 1"``. It also says if
            that may have been for want of memory.
        """
        if not self.ended(_KEEPER_SECONDS):
            self._process.kill()  # the keeper is stuck; without it the worker ends itself (`boot`)
        how = self._process.wait()
        if self._cut_off:
            return self._cut_off
        kills = memory_kills() - self._memory_kills_before
        if kills and how == "killed by SIGKILL":
            how += f" (the kernel has killed {kills} here for want of memory since it started)"
        return how

    def close(self) -> None:
        """Close all descriptors, after `wait`; idempotent, from any thread."""
        with self._closing:
            self._closed = True
            self._ours.close()


def launch(
    seats: Mapping[int, socket.socket],
    threads: int,
    deadline: Deadline,
    *,
    preload: Sequence[str] | None = (),
    tick: Callable[[], float] = lambda: math.inf,
) -> list[LocalWorker]:
    """Start one worker process for each seat, in order. End them with `end`.

    Args:
        seats: the workers' ends of the meeting, by rank.
        threads: how many CPU threads each may use.
        deadline: when to give up.
        preload: fork them, where that can be done, from a process that has loaded these modules as
            well. ``None``: spawn them.
        tick: called again and again while they are forked; returns the seconds until its next call.

    Raises:
        OSError: a process cannot be started; those already started were ended.
        WorkerStartError: one was not started in time; likewise.
        What ``tick`` raises; likewise.
    """
    environment = worker_environment(threads)

    def begin(inherited: Sequence[int]) -> ChildProcess:
        forked = None
        if preload is not None:
            forked = FORK_SERVERS.fork(environment, inherited, deadline, preload, tick)
        return forked or _spawn(environment, inherited)

    workers: list[LocalWorker] = []
    try:
        for rank, seat in seats.items():
            workers.append(LocalWorker(rank, seat, begin))
    except BaseException as error:
        end(workers, 0.0, 0.0)
        for worker in workers:
            worker.close()
        if isinstance(error, GroupTimeoutError):
            late = list(seats)
            reason = f"not ready after {deadline.timeout:g} s (late: {', '.join(map(str, late))})"
            raise WorkerStartError(late[len(workers)], reason) from error
        raise
    return workers


def _spawn(environment: Mapping[str, str], inherited: Sequence[int]) -> ChildProcess:
    spawned = subprocess.Popen(
        [*python_command(_BOOT), *map(str, (*inherited, os.getpid(), _PACKAGE))],
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        cwd=working_folder(),
        pass_fds=inherited,
        start_new_session=True,
    )
    spawned.returncode = 0  # it is waited for by its pid
    return ChildProcess(spawned.pid)


def worker_stacks(workers: Mapping[int, WorkerHandle], seconds: float) -> dict[int, str]:
    """The Python stacks of workers whose `Hello` has come, by rank: those that come in time."""
    files = {rank: worker.stack_file for rank, worker in workers.items()}
    here = {rank: each.pid for rank, each in workers.items() if isinstance(each, LocalWorker)}
    deadline = Deadline.after(seconds)
    return read_stacks(files, here, lambda rank: workers[rank].signal(STACK_SIGNAL), deadline)


def end(workers: Sequence[WorkerHandle], stop_seconds: float, kill_seconds: float) -> None:
    """End all processes of ``workers`` and wait for them; idempotent.

    Args:
        workers: all workers of a pool.
        stop_seconds: how long to wait until they end by themselves, before SIGTERM.
        kill_seconds: how long to wait after SIGTERM, before SIGKILL.
    """
    for seconds, number in ((stop_seconds, signal.SIGTERM), (kill_seconds, signal.SIGKILL)):
        deadline = Deadline.after(seconds)
        for worker in workers:
            if not worker.ended(deadline.remaining()):
                worker.signal(number)
    for worker in workers:
        worker.wait()
