"""Start fork servers, request workers from them, and end them, from the driver.

A process inherits them when it starts. Many can be set later, but not all, and libraries read some
of them while they load: OpenMP its variables and the cores, Python its own. So none is set later,
but the folder, the output and `IDLE_VARIABLES`, which a fork server is told for each worker.

A fork server (`forking`) is a process of this driver that has loaded what every worker needs. It
serves only who is in the circumstances that it was started in; `_KEPT` of them stay. Its workers
do not depend on it: if it is killed, they go on, and another one is started for the next.

Nobody else can ask it: the way to it is a socket pair, which has no address.
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
"""Variables that change while a driver runs, and that nothing reads while it loads: of pytest for
each test, and of torch once it compiles something.
"""
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
"""OpenMP threads that wait for each other spin for a moment, and then sleep.

By default they spin for long, and so keep other processes on the same cores, the driver for one,
from running: embedding took 4 times the processor time. If they sleep at once, waking them between
the products of a forward pass takes a fifth of its time.
"""


def worker_environment(threads: int) -> dict[str, str]:
    """The variables of a worker that may use so many CPU threads."""
    return {
        **(_BRIEF_SPIN if "OMP_WAIT_POLICY" not in os.environ else {}),
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
    }


def working_folder() -> str:
    """The folder that processes of workers start in: the current one, if it can be entered.

    Else the root: in a folder that was deleted torch cannot be loaded.
    """
    try:
        Path.cwd()
        Path().stat()
    except (FileNotFoundError, PermissionError):
        return "/"
    return "."


def python_command(script: Path) -> list[str]:
    """The command that runs ``script`` with the options that this Python was started with, such as
    ``-O``, ``-W`` and ``-X dev``, and without the script's folder in the path.

    Raises:
        RuntimeError: this process does not know of a Python. A frozen program would start itself.
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
    """All that is compared; of the calling thread, which is what would start the process.

    Attributes:
        driver: the driver's pid; a process that was forked from it needs servers of its own.
        executable: Python's.
        path: `sys.path`.
        folder: the current folder's device and inode, if ``path`` is relative to it.
        environment: all variables but `IDLE_VARIABLES`.
        status: identity, signals, cores, umask.
        limits: the resource limits.
        priority: its nice value.
        places: its control groups, and what the kernel kills it for.
        namespaces: the device and inode of its root folder, and its namespaces.
        preload: the modules that it has loaded, beside what every worker needs.
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
        """Those of a process that this thread would start with ``environment``."""
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
    found = path.stat()
    return found.st_dev, found.st_ino


if TYPE_CHECKING:
    Tick = Callable[[], float]

_log = logging.getLogger(__name__)
_KEPT = 2
"""How many servers stay. Pools of one and of more workers get different numbers of threads."""
_ATTEMPTS = 2
"""How often a worker is asked for, if servers are killed; then it is spawned."""
_END_SECONDS = 4.0
"""How long a process that was killed may take to end."""
_TICK_SECONDS = 0.2
_UNKNOWN = "its exit status is not known: the driver ignores SIGCHLD, or has waited for any child"
_SCRIPT = Path(__file__).with_name("forking.py")
_PACKAGE = __name__.partition(".")[0]


def _no_tick() -> float:
    return math.inf


class ChildProcess:
    """A child of this process, whoever has made it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._how = ""
        self._reaping = threading.RLock()  # a signal handler may wait for it, too

    def kill(self) -> None:
        """Send SIGKILL, unless its end was waited for, or it is another user's by now."""
        with self._reaping, suppress(ProcessLookupError, PermissionError):
            if not self._how:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """Wait until it has ended. Returns how, as ``"killed by SIGKILL"``."""
        with self._reaping:
            if not self._how:
                try:
                    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    self._how = self._how or _UNKNOWN
                else:
                    self._how = _told(code)
            return self._how


class _ServerLostError(Exception):
    """The server has ended before it forked; the text says how."""


class _ForkServer:
    """One server.

    Attributes:
        users: how many threads ask it just now; guarded by the registry.
        refusal: why it cannot fork workers; ``""`` if it can, or has not said.
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
            told = theirs.enter_context(open(os.memfd_create("fork-server"), "w+"))  # noqa: PTH123
            json.dump(settings, told)
            told.seek(0)
            self._process = start_process(told.fileno(), inherited, environment)
            self._ours = ours.pop_all()
        self._requests.setblocking(False)

    def usable(self) -> bool:
        """Whether asking it is of use: its process has not ended, or it is known to refuse."""
        return bool(self.refusal) or self._process.poll() is None

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        deadline: Deadline,
        tick: Tick,
    ) -> ChildProcess | None:
        """As `ForkServers.fork`; ``None`` if it refuses.

        Raises:
            _ServerLostError: it has ended.
        """
        if self.refusal:
            return None
        with ExitStack() as undo:
            said, birth = os.pipe()
            undo.callback(os.close, said)
            try:
                try:
                    self._ask(environment, inherited, birth, deadline, tick)
                finally:
                    os.close(birth)
                answer = _answer(said, deadline, tick)
            except BaseException:
                self._after_fork_in_child(said)
                raise
        match answer:
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
        """In a forked child: close what was inherited; the server is the parent's."""
        self._ours.close()
        self._process.returncode = 0  # it is not to be waited for here

    def _ask(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        birth: int,
        deadline: Deadline,
        tick: Tick,
    ) -> None:
        variables = {name: environment.get(name) for name in IDLE_VARIABLES}
        with ExitStack() as undo:
            folder = os.open(working_folder(), os.O_PATH | os.O_DIRECTORY)
            undo.callback(os.close, folder)
            sent = [*inherited, birth, folder, *(_output(number, undo) for number in (1, 2))]
            while True:
                try:
                    socket.send_fds(self._requests, [json.dumps(variables).encode()], sent)
                except BlockingIOError:
                    _wait(self._requests.fileno(), select.POLLOUT, deadline, tick)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._lost() from None
                else:
                    return

    def _lost(self) -> _ServerLostError:
        with suppress(subprocess.TimeoutExpired):
            return _ServerLostError(_told(self._process.wait(_END_SECONDS)))
        return _ServerLostError("about to end")

    def _after_fork_in_child(self, said: int) -> None:
        """End the server, so that it forks nothing later, and what it has forked already."""
        self._end()
        with suppress(GroupTimeoutError):
            match _answer(said, Deadline.after(_END_SECONDS)):
                case {"pid": pid}:
                    newborn = ChildProcess(pid)
                    newborn.kill()
                    newborn.wait()

    def _end(self) -> None:
        try:
            self._process.kill()
        except PermissionError:  # this process has changed its user since
            self._lifeline.close()  # the kernel kills it then
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


def start_process(
    told: int, inherited: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server's process.

    Args:
        told: the descriptor of its settings.
        inherited: the descriptors that it gets, beside its standard ones.
        environment: its variables.
    """
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
    """The servers of this process; any thread may ask. There is one, `FORK_SERVERS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[ProcessEnvironment, _ForkServer] = {}  # the one used last is the last

    def fork(
        self,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        deadline: Deadline,
        preload: Sequence[str],
        tick: Tick,
    ) -> ChildProcess | None:
        """Fork a worker's process, as a child of this one; start a server if there is none for it.

        Args:
            environment: its variables.
            inherited: the four descriptors that `boot.main` gets.
            deadline: when to give up.
            preload: modules that the server has loaded, beside what every worker needs.
            tick: called again and again meanwhile; returns the seconds until its next call.

        Returns:
            ``None`` if workers cannot be forked here; the log says why.

        Raises:
            GroupTimeoutError: the server did not answer in time; it was ended.
            OSError: no process can be started.
            What ``tick`` raises; the server was ended.
        """
        wanted = ProcessEnvironment.now(environment, preload)
        lost = _ServerLostError()
        for _ in range(_ATTEMPTS):
            with self._borrowed(wanted, environment) as server:
                try:
                    return server.fork(environment, inherited, deadline, tick)
                except _ServerLostError as error:
                    lost = error
        _log.warning("a worker is spawned, not forked: fork servers have ended: %s", lost)
        return None

    def prepare(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start the server that `fork` will ask, if there is none: it loads while others go on.

        Where no process can be started, it is `fork` that says so.
        """
        with (
            suppress(OSError),
            self._borrowed(ProcessEnvironment.now(environment, preload), environment),
        ):
            pass

    def close(self) -> None:
        """End all servers; workers that they have forked go on."""
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()

    def forget(self) -> None:
        """In a forked child: have no servers."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        while self._servers:
            self._servers.popitem()[1].forget()

    @contextmanager
    def _borrowed(
        self, wanted: ProcessEnvironment, environment: Mapping[str, str]
    ) -> Iterator[_ForkServer]:
        with self._lock:
            server = self._servers.pop(wanted, None)
            if server is None or not server.usable():
                if server is not None and not server.users:
                    server.close()
                self._make_room()
                server = _ForkServer(environment, wanted.preload)
            self._servers[wanted] = server
            server.users += 1
        try:
            yield server
        finally:
            with self._lock:
                server.users -= 1
                if not server.users and self._servers.get(wanted) is not server:
                    server.close()

    def _make_room(self) -> None:
        idle = [wanted for wanted, server in self._servers.items() if not server.users]
        for wanted in idle[: max(len(self._servers) - _KEPT + 1, 0)]:
            self._servers.pop(wanted).close()


def _told(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def _output(number: int, undo: ExitStack) -> int:
    """A copy of standard output or error, or of the null device if this process was given none.

    Then the number may since be that of a file or a socket.
    """
    given = sys.__stdout__ if number == 1 else sys.__stderr__
    try:
        found = os.dup(number if _is_open(given) else -1)
    except OSError:
        found = os.open(os.devnull, os.O_WRONLY)
    undo.callback(os.close, found)
    return found


def _is_open(given: TextIO | None) -> bool:
    try:
        return given is not None and not given.closed
    except ValueError:  # detached, as in a worker, whose lines another one labels
        return True


def _answer(said: int, deadline: Deadline, tick: Tick = _no_tick) -> dict[str, Any] | None:
    """What the server or the newborn says first; ``None`` if there is neither any more."""
    heard = b""
    while b"\n" not in heard:
        _wait(said, select.POLLIN, deadline, tick)
        more = os.read(said, 1024)
        if not more:
            return None
        heard += more
    answer: dict[str, Any] = json.loads(heard.partition(b"\n")[0])
    return answer


def _wait(fd: int, event: int, deadline: Deadline, tick: Tick) -> None:
    poll = select.poll()
    poll.register(fd, event)
    # A pool that is shut down rings nothing here, so `tick` is called every now and then.
    while not poll.poll(deadline.remaining(at_most=min(tick(), _TICK_SECONDS)) * 1000):
        deadline.check("fork a worker")


FORK_SERVERS = ForkServers()
"""The servers of this process."""
atexit.register(FORK_SERVERS.close)
os.register_at_fork(after_in_child=FORK_SERVERS.forget)
