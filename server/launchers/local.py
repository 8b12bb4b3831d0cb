"""Start workers as processes of this host, each in its own session, and end them.

In its own session a worker does not receive the terminal's signals (Ctrl-C, hang-up): the driver
does, and ends the workers in order. Between the driver and each worker runs the worker's reaper,
which kills all descendants when the worker ends.

A worker inherits three descriptors: the control channel, the lifeline and the file for its stack.
`launchers.boot` explains their use.

The reaper is a child of the driver in both cases: forked by a process that has loaded torch
(`launchers.fork_servers`), or spawned as a new interpreter.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from shm_broadcast import Deadline, GroupTimeoutError
from shm_broadcast.cpu import memory_kills
from shm_broadcast.deadline import milliseconds
from shm_broadcast.process import is_ending, system_call
from shm_broadcast.state.stacks import STACK_SIGNAL, StackFile, read_stacks

from ..control.channel import Channel, ChannelClosedError
from ..control.protocol import FromWorker, Resume, Start
from ..errors import WorkerStartError
from .boot import END_SIGNAL
from .fork_servers import FORK_SERVERS, ChildProcess, Tick, start_process, worker_environment


class WorkerChannel(Protocol):
    """The driver's end of a control channel; see `control.channel.Channel`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` returns a message or raises."""

    def send(self, message: Start | Resume, deadline: Deadline = ...) -> None:
        """Send a message."""

    def take(self) -> FromWorker | None:
        """Return the next message if it has arrived, else ``None``. Raises `ChannelClosedError`."""


class WorkerHandle(Protocol):
    """A worker's process: a `LocalWorker`, or a `remote_hosts.RemoteWorker` on another host.

    Attributes:
        connected: whether its `Hello` has arrived: it can show its stack.
        detached: whether its `Detached` has arrived: it waits for `start`.
    """

    rank: int
    pid: int
    connected: bool
    detached: bool

    @property
    def channel(self) -> WorkerChannel:
        """Return the driver's end of the control channel."""

    @property
    def pidfd(self) -> int:
        """Return a descriptor that is readable when the process has ended."""

    @property
    def stack_file(self) -> StackFile:
        """Return the file for the worker's stack."""

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message. Does nothing if the process has ended."""

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process has ended; False after ``timeout`` seconds."""

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or, after its `Hello`, `STACK_SIGNAL` for `stack_file`."""

    def kill_if_detached(self) -> None:
        """Kill a process that closed its control channel but keeps running."""

    def wait(self) -> str:
        """Wait for an ended or killed process; return its end, as ``"exit status 1"``."""

    def close(self) -> None:
        """Close all descriptors, after `wait`; idempotent, from any thread."""


_ENDING_SECONDS = 0.5
"""Longest time from the close of descriptors to a regular exit; sandboxes may hide an exit."""
_REAPER_SECONDS = 4.0
"""Longest time of a reaper to kill its worker's descendants."""


class LocalWorker:
    """The driver's handle of one worker's process and its reaper; see `WorkerHandle`.

    ``pid`` is the worker's process, group and session; before its `Hello` the reaper's pid.
    ``pidfd`` is of the reaper, which ends after the worker.
    """

    def __init__(self, rank: int, begin: Callable[[Sequence[int]], ChildProcess]) -> None:
        """Start the process by ``begin(descriptors to inherit)``; `start` follows."""
        self.rank = rank
        self.connected = self.detached = False
        self._exec_text = ""
        self._memory_kills_before = memory_kills()
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close it, too
        with ExitStack() as ours, ExitStack() as theirs:
            connection, control = socket.socketpair()
            theirs.enter_context(control)
            self.channel = Channel(connection, FromWorker)
            ours.callback(self.channel.close)
            their_end, lifeline = os.pipe()
            theirs.callback(os.close, their_end)
            self._lifeline = ours.enter_context(open(lifeline, "wb", 0))  # noqa: PTH123
            self.stack_file = StackFile()
            ours.callback(self.stack_file.close)
            inherited = (control.fileno(), their_end, self.stack_file.fd)
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
        """Send the start message; raise GroupTimeoutError if the worker does not read.

        Does nothing if the process has ended.
        """
        self.detached = False
        with suppress(ChannelClosedError):
            self.channel.send(start, deadline)

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process and its reaper have ended; False after ``timeout`` seconds."""
        if self._closed:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(milliseconds(timeout)))

    def signal(self, number: int) -> None:
        """Send a signal; if this process has changed its user, only SIGKILL arrives."""
        with self._closing, suppress(ProcessLookupError):
            if not self._closed:
                # The reaper forwards it: as the worker's parent it rules out a reused pid. SIGKILL
                # would end the reaper instead.
                forwarded = END_SIGNAL if number == signal.SIGKILL else number
                try:
                    signal.pidfd_send_signal(self.pidfd, forwarded)
                except PermissionError:
                    if number == signal.SIGKILL:
                        self._lifeline.close()  # so the kernel kills it

    def kill_if_detached(self) -> None:
        """Kill a process that called exec or closed its descriptors: it is no worker any more."""
        if not self.connected or is_ending(self.pid) or self.ended(_ENDING_SECONDS):
            return
        program: object = "an unreadable program"
        with suppress(OSError):
            program = Path(f"/proc/{self.pid}/exe").readlink()
        self._exec_text = (
            "it became another program (exec), or closed its descriptors, and was ended; "
            f"it ran {program}"
        )
        self.signal(signal.SIGKILL)

    def wait(self) -> str:
        """Wait and return the kind of end, with a note on the kernel's OOM killer."""
        if not self.ended(_REAPER_SECONDS):
            self._process.kill()  # the reaper is stuck; without it the worker ends (`boot`)
        how = self._process.wait()
        if self._exec_text:
            return self._exec_text
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
    ranks: Sequence[int],
    threads: int,
    deadline: Deadline,
    *,
    preload: Sequence[str] | None = (),
    tick: Tick = lambda: math.inf,
) -> list[LocalWorker]:
    """Start one worker process for each of ``ranks``, in order. End them with `end`.

    After an error, also one of ``tick``, all started processes have ended.

    Args:
        threads: CPU threads of each worker.
        preload: fork them, where possible, from a process that has also loaded these modules.
            ``None``: spawn them.
        tick: called repeatedly during a fork; returns the seconds until its next call.

    Raises:
        OSError, WorkerStartError: a process cannot be started, or was not in time.
    """
    environment = worker_environment(threads)

    def begin(inherited: Sequence[int]) -> ChildProcess:
        forked = None
        if preload is not None:
            forked = FORK_SERVERS.fork(environment, inherited, deadline, preload, tick)
        return forked or _spawn(environment, inherited)

    workers: list[LocalWorker] = []
    try:
        workers.extend(LocalWorker(rank, begin) for rank in ranks)
    except BaseException as error:
        end(workers, 0.0, 0.0)
        for worker in workers:
            worker.close()
        if isinstance(error, GroupTimeoutError):
            reason = f"not ready after {deadline.timeout:g} s (late: {', '.join(map(str, ranks))})"
            raise WorkerStartError(ranks[len(workers)], reason) from error
        raise
    return workers


def _spawn(environment: Mapping[str, str], inherited: Sequence[int]) -> ChildProcess:
    spawned = start_process({"inherited": inherited}, inherited, environment)
    spawned.returncode = 0  # `ChildProcess` waits for it
    return ChildProcess(spawned.pid)


def worker_stacks(workers: Mapping[int, WorkerHandle], seconds: float) -> dict[int, str]:
    """Return the Python stacks, by rank, that connected workers write within ``seconds``."""
    files = {rank: worker.stack_file for rank, worker in workers.items()}
    local = {rank: each.pid for rank, each in workers.items() if isinstance(each, LocalWorker)}
    deadline = Deadline.after(seconds)
    return read_stacks(files, local, lambda rank: workers[rank].signal(STACK_SIGNAL), deadline)


def end(workers: Sequence[WorkerHandle], stop_seconds: float, kill_seconds: float) -> None:
    """End all processes of ``workers`` and wait for them; idempotent.

    They have ``stop_seconds`` until SIGTERM, and ``kill_seconds`` from there to SIGKILL.
    """
    for seconds, number in ((stop_seconds, signal.SIGTERM), (kill_seconds, signal.SIGKILL)):
        deadline = Deadline.after(seconds)
        for worker in workers:
            if not worker.ended(deadline.remaining()):
                worker.signal(number)
    for worker in workers:
        worker.wait()
