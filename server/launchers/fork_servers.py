"""Start fork servers, request workers from them, and end them, from the driver.

A fork server (`boot`) is a process of this driver that has loaded the modules of every worker. It
serves only drivers with the state in which it was started (`server_key`); `_KEPT` servers stay.
That state is inherited at the start and cannot be changed later, or is read while libraries load
(OpenMP's variables, Python's). Only the folder, the output and `IDLE_VARIABLES` are sent with each
request. Limits, control groups and namespaces stay those of the server's start.

Workers do not depend on their server: if it is killed, they continue, and the next request starts
another one. No other process can send requests: a socket pair has no address.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from shm_broadcast import Deadline, GroupTimeoutError

Tick = Callable[[], float]
IDLE_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})
"""Variables that change while a driver runs, and that no library reads while it loads."""
_INHERITED_STATUS = (
    *("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp"),
    *("Umask", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed"),
)
"""Beginnings of the lines of proc_pid_status(5) that a new process inherits."""
_BRIEF_SPIN = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""OpenMP threads spin briefly, and then sleep.

By default they spin for long, which blocks other processes on the same cores, such as the driver:
embedding took 4 times the processor time. Without a spin, wake-ups take a fifth of a forward pass.
"""
_log = logging.getLogger(__name__)
_KEPT = 2
"""Most servers. Pools of one and of several workers have different numbers of threads."""
_ATTEMPTS = 2
"""Most requests for a worker, if servers are killed; then it is spawned."""
_END_SECONDS = 4.0
"""Longest time of a killed process to end."""
_TICK_SECONDS = 0.2
_LARGEST_REPLY = 1 << 16
_UNKNOWN = "its exit status is not known: the driver ignores SIGCHLD, or has waited for any child"
_BOOT = Path(__file__).with_name("boot.py")
_PACKAGE = __name__.partition(".")[0]


def worker_environment(threads: int) -> dict[str, str]:
    """Return the variables of a worker with so many CPU threads."""
    return {
        **(_BRIEF_SPIN if "OMP_WAIT_POLICY" not in os.environ else {}),
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
    }


def working_folder() -> str:
    """Return the start folder of workers: the current one, or the root if that was deleted.

    torch cannot be loaded in a deleted folder.
    """
    try:
        Path.cwd()
        Path().stat()
    except (FileNotFoundError, PermissionError):
        return "/"
    return "."


def python_command(script: Path) -> list[str]:
    """Return the command that runs ``script`` with this Python's options, such as ``-O``.

    A frozen program would start itself: RuntimeError.
    """
    if hasattr(sys, "frozen") or not sys.executable:
        raise RuntimeError(
            "workers are run by the Python that sys.executable names; in this program, which is "
            f"frozen or embeds Python, that is {sys.executable!r}"
        )
    # as `multiprocessing` does; there is no public function
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, "-P", str(script)]


def about_driver() -> dict[str, Any]:
    """Return the settings of `boot` that are the same for all processes."""
    return {"driver": os.getpid(), "package": _PACKAGE, "path": list(map(str, sys.path))}


def start_process(
    settings: Mapping[str, Any],
    inherited: Sequence[int],
    environment: Mapping[str, str],
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that runs `boot` with ``settings``; ``output`` is as for Popen."""
    return subprocess.Popen(
        # By Python's JSON: a folder's name may not be valid UTF-8.
        [*python_command(_BOOT), json.dumps({**settings, **about_driver()})],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environment),
        cwd=working_folder(),
        pass_fds=inherited,
        start_new_session=True,
    )


def server_key(environment: Mapping[str, str], preload: Sequence[str]) -> Hashable:
    """Return the state that a server has from its start, as the calling thread would pass it on.

    A process that was forked from the driver needs its own servers.
    """
    path = tuple(map(str, sys.path))
    relative = not all(map(os.path.isabs, path))
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        os.getpid(),
        sys.executable,
        path,
        os.path.abspath(working_folder()) if relative else None,  # noqa: PTH100
        frozenset(environment.items() - {(name, environment.get(name)) for name in IDLE_VARIABLES}),
        tuple(line for line in status if line.startswith(_INHERITED_STATUS)),
        tuple(preload),
    )


class ChildProcess:
    """A child of this process, forked or spawned."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._how = ""
        self._reaping = threading.RLock()  # a signal handler may call `wait`, too

    def kill(self) -> None:
        """Send SIGKILL, unless it was reaped, or belongs to another user by now."""
        with self._reaping, suppress(ProcessLookupError, PermissionError):
            if not self._how:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """Wait until it has ended; return how, as ``"killed by SIGKILL"``."""
        with self._reaping:
            if not self._how:
                try:
                    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    self._how = self._how or _UNKNOWN
                else:
                    self._how = _end_text(code)
            return self._how


class _ServerLostError(Exception):
    """The server has ended before it forked; the text says how."""


class _ForkServer:
    """One server; it is killed with the last reference to it, or at exit.

    Attributes:
        refusal: the reason why it cannot fork workers; ``""``: it can, or has not replied.
        close: kills it; idempotent.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self.refusal = ""
        with ExitStack() as ours, ExitStack() as theirs:
            self._requests, requests = socket.socketpair(type=socket.SOCK_SEQPACKET)
            ours.enter_context(self._requests)
            theirs.enter_context(requests)
            self._requests.setblocking(False)
            their_end, lifeline = os.pipe()
            theirs.callback(os.close, their_end)
            self._lifeline = ours.enter_context(open(lifeline, "wb", 0))  # noqa: PTH123
            inherited = requests.fileno(), their_end
            settings = {"requests": inherited[0], "lifeline": their_end, "preload": list(preload)}
            self._process = start_process(settings, inherited, environment, subprocess.DEVNULL)
            self._ours = ours.pop_all()
        self.close = weakref.finalize(
            self, _close_server, self._process, self._lifeline, self._ours
        )

    def usable(self) -> bool:
        """Return whether a request makes sense: its process runs, or it has refused."""
        return bool(self.refusal) or self._process.poll() is None

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        deadline: Deadline,
        tick: Tick,
    ) -> ChildProcess | None:
        """Fork, or return ``None`` if it refuses; raise `_ServerLostError` if it has ended."""
        if self.refusal:
            return None
        reader, writer = os.pipe()
        try:
            try:
                self._send_request(environment, inherited, writer)
            finally:
                os.close(writer)
            reply = _reply(reader, deadline, tick)
        except BaseException:
            self._end_with_child(reader)
            raise
        finally:
            os.close(reader)
        match reply:
            case {"pid": pid}:
                return ChildProcess(pid)
            case {"errno": number}:
                raise OSError(number, f"a worker cannot be forked: {os.strerror(number)}")
            case {"refusal": refusal}:
                if not self.refusal:
                    _log.warning("workers are spawned, not forked: %s", refusal)
                self.refusal = refusal
                return None
        raise self._lost()

    def forget(self) -> None:
        """Close the inherited descriptors in a forked child; the server is the parent's."""
        self.close.detach()
        self._ours.close()
        self._process.returncode = 0  # the parent waits for it

    def _send_request(
        self, environment: Mapping[str, str], inherited: Sequence[int], writer: int
    ) -> None:
        variables = {name: environment.get(name) for name in IDLE_VARIABLES}
        with ExitStack() as undo:
            folder = os.open(working_folder(), os.O_PATH | os.O_DIRECTORY)
            undo.callback(os.close, folder)
            fds = [*inherited, writer, folder, *(_output(number, undo) for number in (1, 2))]
            try:
                socket.send_fds(self._requests, [json.dumps(variables).encode()], fds)
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost() from None

    def _lost(self) -> _ServerLostError:
        with suppress(subprocess.TimeoutExpired):
            return _ServerLostError(_end_text(self._process.wait(_END_SECONDS)))
        return _ServerLostError("about to end")

    def _end_with_child(self, reader: int) -> None:
        """End the server, so that it forks no more, and its last child."""
        _kill_server(self._process, self._lifeline)
        with suppress(GroupTimeoutError):
            match _reply(reader, Deadline.after(_END_SECONDS)):
                case {"pid": pid}:
                    child = ChildProcess(pid)
                    child.kill()
                    child.wait()


def _kill_server(process: subprocess.Popen[bytes], lifeline: BinaryIO) -> None:
    try:
        process.kill()
    except PermissionError:  # this process has changed its user since
        lifeline.close()  # so the kernel kills it
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _close_server(process: subprocess.Popen[bytes], lifeline: BinaryIO, ours: ExitStack) -> None:
    _kill_server(process, lifeline)
    ours.close()


class ForkServers:
    """The servers of this process; any thread may call. The only instance is `FORK_SERVERS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[Hashable, _ForkServer] = {}  # least recently used first

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        deadline: Deadline,
        preload: Sequence[str],
        tick: Tick,
    ) -> ChildProcess | None:
        """Fork a worker's process, as a child of this one; start a server if needed.

        ``inherited`` are the three descriptors of `boot.run_worker`; ``preload`` modules that the
        server has loaded, beside those of every worker. ``tick`` is called repeatedly, returns the
        seconds until its next call, and may raise. Returns ``None`` if workers cannot be forked;
        the log has the reason.

        Raises:
            GroupTimeoutError: the server did not reply in time. It was ended, as for errors of
                ``tick``.
            OSError: no process can be started.
        """
        how = ""
        for _ in range(_ATTEMPTS):
            server = self._server(environment, preload)
            try:
                return server.fork(environment, inherited, deadline, tick)
            except _ServerLostError as error:
                how = str(error)
        _log.warning("a worker is spawned, not forked: fork servers have ended: %s", how)
        return None

    def prepare(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start the server for a later `fork`, which then reports any error; it loads meanwhile."""
        with suppress(OSError):
            self._server(environment, preload)

    def close(self) -> None:
        """End all servers; workers that they have forked continue."""
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()

    def forget(self) -> None:
        """Drop all servers in a forked child."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        while self._servers:
            self._servers.popitem()[1].forget()

    def _server(self, environment: Mapping[str, str], preload: Sequence[str]) -> _ForkServer:
        key = server_key(environment, preload)
        with self._lock:
            server = self._servers.pop(key, None)
            if server is None or not server.usable():
                for oldest in [*self._servers][: len(self._servers) - _KEPT + 1]:
                    del self._servers[oldest]
                server = _ForkServer(environment, preload)
            self._servers[key] = server
            return server


def _end_text(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def _output(number: int, undo: ExitStack) -> int:
    """Return a copy of standard output or error, or of /dev/null if that is closed."""
    try:
        # Another file that was opened as ``number`` since is not inheritable.
        copy = os.dup(number if os.get_inheritable(number) else -1)
    except OSError:
        copy = os.open(os.devnull, os.O_WRONLY)
    undo.callback(os.close, copy)
    return copy


def _reply(reader: int, deadline: Deadline, tick: Tick = lambda: math.inf) -> dict[str, Any]:
    """Return the first message of the server or the child; an empty one if both have ended."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    # A pool's shutdown does not wake this thread, so `tick` is called periodically.
    while not poll.poll(deadline.remaining(at_most=min(tick(), _TICK_SECONDS)) * 1000):
        deadline.check("fork a worker")
    first, _, _ = os.read(reader, _LARGEST_REPLY).partition(b"\n")
    reply: dict[str, Any] = json.loads(first or b"{}")
    return reply


FORK_SERVERS = ForkServers()
"""The servers of this process."""
os.register_at_fork(after_in_child=FORK_SERVERS.forget)
