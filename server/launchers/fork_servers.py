"""Start fork servers, request workers from them, and end them, from the driver.

A fork server (`forking`) is a process of this driver that has loaded the modules of every worker.
It serves only drivers with the `ProcessEnvironment` in which it was started; `_KEPT` servers stay.
Most parts of the environment are inherited at the start and cannot be changed later, or are read
while libraries load (OpenMP's variables, Python's). Only the folder, the output and
`IDLE_VARIABLES` are sent with each request.

Workers do not depend on their server: if it is killed, they continue, and the next request starts
another one. No other process can send requests: a socket pair has no address.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from shm_broadcast import Deadline, GroupTimeoutError

IDLE_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})
"""Variables that change while a driver runs, and that no library reads while it loads."""
_STATUS = frozenset(
    (
        *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
        *("Umask", "SigBlk", "SigIgn", "Seccomp", "Seccomp_filters"),
        *("Cpus_allowed", "Mems_allowed"),
    )
)
"""The fields of proc_pid_status(5) that a new process inherits."""
_THREAD = Path("/proc/thread-self")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


_BRIEF_SPIN = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""OpenMP threads spin briefly, and then sleep.

By default they spin for long, which blocks other processes on the same cores, such as the driver:
embedding took 4 times the processor time. Without a spin, wake-ups take a fifth of a forward pass.
"""


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


class ProcessEnvironment(NamedTuple):
    """The state that a new process inherits from the calling thread; the key of a server.

    Attributes:
        driver: the driver's pid; a process forked from it needs its own servers.
        folder: the current folder's device and inode, if ``path`` is relative to it.
        environment: all variables but `IDLE_VARIABLES`.
        status: identity, signals, cores, umask.
        places: its control groups, and its OOM score adjustment.
        namespaces: the device and inode of its root folder, and its namespaces.
        preload: the modules that it has loaded, beside those of every worker.
    """

    driver: int
    executable: str
    path: tuple[str, ...]
    folder: tuple[int, int] | None
    environment: frozenset[tuple[str, str]]
    status: tuple[str, ...]
    limits: tuple[tuple[int, int], ...]
    priority: int
    places: tuple[str, ...]
    namespaces: tuple[tuple[int, int], ...]
    preload: tuple[str, ...]

    @classmethod
    def now(cls, environment: Mapping[str, str], preload: Sequence[str]) -> ProcessEnvironment:
        """Return that of a process that this thread would start with ``environment``."""
        path = tuple(map(str, sys.path))
        relative = not all(map(os.path.isabs, path))
        return cls(
            driver=os.getpid(),
            executable=sys.executable,
            path=path,
            folder=_identity(Path(working_folder())) if relative else None,
            environment=frozenset(
                (name, value) for name, value in environment.items() if name not in IDLE_VARIABLES
            ),
            status=tuple(_status()),
            limits=tuple(map(resource.getrlimit, _LIMITS)),
            priority=os.getpriority(os.PRIO_PROCESS, 0),
            places=tuple((_THREAD / name).read_text() for name in ("cgroup", "oom_score_adj")),
            namespaces=tuple(map(_identity, (_THREAD / "root", *(_THREAD / "ns").iterdir()))),
            preload=tuple(preload),
        )


def _status() -> Iterator[str]:
    for line in (_THREAD / "status").read_text().splitlines():
        if line.partition(":")[0] in _STATUS:
            yield line


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


if TYPE_CHECKING:
    Tick = Callable[[], float]

_log = logging.getLogger(__name__)
_KEPT = 2
"""Most idle servers. Pools of one and of several workers have different numbers of threads."""
_ATTEMPTS = 2
"""Most requests for a worker, if servers are killed; then it is spawned."""
_END_SECONDS = 4.0
"""Longest time of a killed process to end."""
_TICK_SECONDS = 0.2
_UNKNOWN = "its exit status is not known: the driver ignores SIGCHLD, or has waited for any child"
_SCRIPT = Path(__file__).with_name("forking.py")
_PACKAGE = __name__.partition(".")[0]


def _no_tick() -> float:
    return math.inf


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
    """One server.

    Attributes:
        users: the number of threads with a request; guarded by the registry.
        refusal: the reason why it cannot fork workers; ``""``: it can, or has not replied.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self.users = 0
        self.refusal = ""
        with ExitStack() as ours, ExitStack() as theirs:
            self._requests, asked = socket.socketpair(type=socket.SOCK_SEQPACKET)
            theirs.callback(asked.close)
            ours.callback(self._requests.close)
            heartbeat, lifeline = os.pipe()
            theirs.callback(os.close, heartbeat)
            self._lifeline = ours.enter_context(ExitStack())
            self._lifeline.callback(os.close, lifeline)
            inherited = asked.fileno(), heartbeat
            settings = {
                "path": list(map(str, sys.path)),
                "package": _PACKAGE,
                "preload": list(preload),
                "driver": os.getpid(),
                "requests": inherited[0],
                "lifeline": inherited[1],
            }
            file = theirs.enter_context(open(os.memfd_create("fork-server"), "w+"))  # noqa: PTH123
            json.dump(settings, file)
            file.seek(0)
            self._process = start_process(file.fileno(), inherited, environment)
            self._ours = ours.pop_all()
        self._requests.setblocking(False)

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
        with ExitStack() as undo:
            reader, writer = os.pipe()
            undo.callback(os.close, reader)
            try:
                try:
                    self._send_request(environment, inherited, writer, deadline, tick)
                finally:
                    os.close(writer)
                reply = _reply(reader, deadline, tick)
            except BaseException:
                self._end_with_child(reader)
                raise
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

    def close(self) -> None:
        """End its process; idempotent."""
        self._end()
        self._ours.close()

    def forget(self) -> None:
        """Close the inherited descriptors in a forked child; the server is the parent's."""
        self._ours.close()
        self._process.returncode = 0  # the parent waits for it

    def _send_request(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        writer: int,
        deadline: Deadline,
        tick: Tick,
    ) -> None:
        variables = {name: environment.get(name) for name in IDLE_VARIABLES}
        with ExitStack() as undo:
            folder = os.open(working_folder(), os.O_PATH | os.O_DIRECTORY)
            undo.callback(os.close, folder)
            fds = [*inherited, writer, folder, *(_output(number, undo) for number in (1, 2))]
            while True:
                try:
                    socket.send_fds(self._requests, [json.dumps(variables).encode()], fds)
                except BlockingIOError:
                    _wait(self._requests.fileno(), select.POLLOUT, deadline, tick)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._lost() from None
                else:
                    return

    def _lost(self) -> _ServerLostError:
        with suppress(subprocess.TimeoutExpired):
            return _ServerLostError(_end_text(self._process.wait(_END_SECONDS)))
        return _ServerLostError("about to end")

    def _end_with_child(self, reader: int) -> None:
        """End the server, so that it forks no more, and its last child."""
        self._end()
        with suppress(GroupTimeoutError):
            match _reply(reader, Deadline.after(_END_SECONDS)):
                case {"pid": pid}:
                    child = ChildProcess(pid)
                    child.kill()
                    child.wait()

    def _end(self) -> None:
        try:
            self._process.kill()
        except PermissionError:  # this process has changed its user since
            self._lifeline.close()  # so the kernel kills it
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


def start_process(
    told: int, inherited: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server's process; ``told`` is the descriptor of its settings."""
    return subprocess.Popen(
        python_command(_SCRIPT),
        stdin=told,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        cwd=working_folder(),
        pass_fds=inherited,
        start_new_session=True,
    )


class ForkServers:
    """The servers of this process; any thread may call. The only instance is `FORK_SERVERS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[ProcessEnvironment, _ForkServer] = {}  # least recently used first

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        deadline: Deadline,
        preload: Sequence[str],
        tick: Tick,
    ) -> ChildProcess | None:
        """Fork a worker's process, as a child of this one; start a server if needed.

        ``inherited`` are the three descriptors of `boot.main`; ``preload`` modules that the server
        has loaded, beside those of every worker. ``tick`` is called repeatedly, returns the seconds
        until its next call, and may raise. Returns ``None`` if workers cannot be forked; the log
        has the reason.

        Raises:
            GroupTimeoutError: the server did not reply in time. It was ended, as for errors of
                ``tick``.
            OSError: no process can be started.
        """
        key = ProcessEnvironment.now(environment, preload)
        lost = _ServerLostError()
        for _ in range(_ATTEMPTS):
            with self._borrowed(key, environment) as server:
                try:
                    return server.fork(environment, inherited, deadline, tick)
                except _ServerLostError as error:
                    lost = error
        _log.warning("a worker is spawned, not forked: fork servers have ended: %s", lost)
        return None

    def prepare(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start the server for a later `fork`, which then reports any error; it loads meanwhile."""
        with (
            suppress(OSError),
            self._borrowed(ProcessEnvironment.now(environment, preload), environment),
        ):
            pass

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

    @contextmanager
    def _borrowed(
        self, key: ProcessEnvironment, environment: Mapping[str, str]
    ) -> Iterator[_ForkServer]:
        with self._lock:
            server = self._servers.pop(key, None)
            if server is None or not server.usable():
                if server is not None and not server.users:
                    server.close()
                self._make_room()
                server = _ForkServer(environment, key.preload)
            self._servers[key] = server
            server.users += 1
        try:
            yield server
        finally:
            with self._lock:
                server.users -= 1
                if not server.users and self._servers.get(key) is not server:
                    server.close()

    def _make_room(self) -> None:
        idle = [key for key, server in self._servers.items() if not server.users]
        for key in idle[: max(len(self._servers) - _KEPT + 1, 0)]:
            self._servers.pop(key).close()


def _end_text(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def _output(number: int, undo: ExitStack) -> int:
    """Return a copy of standard output or error, or of /dev/null if that is closed."""
    file = sys.__stdout__ if number == 1 else sys.__stderr__
    try:
        copy = os.dup(number if _is_open(file) else -1)
    except OSError:
        copy = os.open(os.devnull, os.O_WRONLY)
    undo.callback(os.close, copy)
    return copy


def _is_open(file: TextIO | None) -> bool:
    try:
        return file is not None and not file.closed
    except ValueError:  # detached by `LabelledText`, as in a worker
        return True


def _reply(reader: int, deadline: Deadline, tick: Tick = _no_tick) -> dict[str, Any] | None:
    """Return the first message of the server or the child; ``None`` if both have ended."""
    data = b""
    while b"\n" not in data:
        _wait(reader, select.POLLIN, deadline, tick)
        more = os.read(reader, 1024)
        if not more:
            return None
        data += more
    reply: dict[str, Any] = json.loads(data.partition(b"\n")[0])
    return reply


def _wait(fd: int, event: int, deadline: Deadline, tick: Tick) -> None:
    poll = select.poll()
    poll.register(fd, event)
    # A pool's shutdown does not wake this thread, so `tick` is called periodically.
    while not poll.poll(deadline.remaining(at_most=min(tick(), _TICK_SECONDS)) * 1000):
        deadline.check("fork a worker")


FORK_SERVERS = ForkServers()
"""The servers of this process."""
atexit.register(FORK_SERVERS.close)
os.register_at_fork(after_in_child=FORK_SERVERS.forget)
