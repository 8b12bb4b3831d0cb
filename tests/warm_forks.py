"""Fork servers of pools, forked from a process that has loaded torch, which takes a second: a nest.

They run `server.launchers.boot` as otherwise. For ranks and for programs (`tests.programs`) the
nest is a copy of themselves; pytest starts one. A fork server in other circumstances than the nest
is started as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import server.worker  # noqa: F401 - what fork servers load
from server.launchers import boot, fork_servers
from server.launchers.fork_servers import python_command, server_key, worker_environment
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_LARGEST = 1 << 18
_UNSEEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""What Python does not show by itself."""


def warm_fork_servers() -> None:
    """Have this process's fork servers forked from a copy of it that is made now.

    It must have one thread, and be in the namespaces that its workers belong to.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            os.setsid()
            ours.close()
            _be_silent()
            _nest(theirs, parent)
        finally:
            os._exit(1)
    theirs.close()
    _fork_from(ours, lambda _: True)


def start_nest() -> None:
    """As `warm_fork_servers`, from a process that is started now, for one that has threads.

    Only fork servers in the circumstances of now are forked from it.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    threads = len(os.sched_getaffinity(0))
    environment = worker_environment(threads)
    call = f"be_nest({theirs.fileno()}, {os.getpid()})"
    code = f"import sys; sys.path[:] = {sys.path}; import tests.warm_forks as it; it.{call}"
    nest = subprocess.Popen(
        [*python_command(Path("-c")), code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    for end in (nest.wait, nest.kill, ours.close):  # the last one first
        atexit.register(end)
    its = _circumstances(environment)

    def serves(environment: Mapping[str, str]) -> bool:
        few = environment["OMP_NUM_THREADS"] in {"1", str(threads)}
        wanted = {**environment, "OMP_NUM_THREADS": str(threads)}
        return few and nest.poll() is None and _circumstances(wanted) == its

    _fork_from(ours, serves)


def _circumstances(environment: Mapping[str, str]) -> tuple[Any, ...]:
    thread = Path("/proc/thread-self")
    return (
        server_key(environment, ()),
        (thread / "limits").read_text(),
        (thread / "cgroup").read_text(),
        *(place.readlink() for place in sorted((thread / "ns").iterdir())),
    )


def be_nest(asked: int, parent: int) -> None:
    refusal = boot.load_workers_modules("server", ["tests.huge_pages"])
    assert not refusal, refusal
    with socket.socket(fileno=asked) as requests:
        _nest(requests, parent)


def _fork_from(nest: socket.socket, serves: Callable[[Mapping[str, str]], bool]) -> None:
    """Fork this process's fork servers from a nest that serves, until it ends or times out."""
    parent = os.getpid()
    nest.settimeout(PATIENCE_SECONDS)
    asking = threading.Lock()
    start_cold = fork_servers.start_process

    def start(
        settings: Mapping[str, Any],
        inherited: Sequence[int],
        environment: Mapping[str, str],
        output: int | None = None,
    ) -> _Forked | subprocess.Popen[bytes]:
        if "preload" not in settings or os.getpid() != parent or not serves(environment):
            return start_cold(settings, inherited, environment, output)
        about_driver = fork_servers.about_driver()
        asked = json.dumps([{**settings, **about_driver}, inherited, dict(environment)]).encode()
        with asking, suppress(OSError):
            socket.send_fds(nest, [asked], inherited)
            answer = nest.recv(64)
            if answer:
                return _Forked(int(answer))
        nest.close()  # what it may answer yet is nobody's
        return start_cold(settings, inherited, environment, output)

    fork_servers.start_process = start


class _Forked:
    """A fork server's process, as its driver uses a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None and time.monotonic() < until:
            time.sleep(0.001)
        return code or 0


def _nest(asked: socket.socket, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        request, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 8)
        if not request:
            return
        pid = boot.clone_sibling()
        if pid == 0:
            try:
                _become(descriptors, *json.loads(request))
            finally:
                os._exit(1)
        asked.send(str(pid).encode())
        for each in descriptors:
            os.close(each)


def _become(
    descriptors: list[int],
    settings: dict[str, Any],
    inherited: list[int],
    environment: dict[str, Any],
) -> None:
    """Be as a process that was started with these descriptors and variables, and serve."""
    os.setsid()
    _take(inherited, descriptors)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()
    for category in _UNSEEN:
        warnings.simplefilter("ignore", category)
    threads = int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    if threads != torch.get_num_threads():  # to set it starts threads, but for one
        torch.set_num_threads(threads)
    sys.argv[:] = [str(boot.__file__), json.dumps(settings)]
    boot.main()
    os._exit(0)


def _be_silent() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


def _take(numbers: list[int], descriptors: list[int]) -> None:
    """Keep no descriptors but these, under these numbers."""
    beyond = max(*numbers, *descriptors) + 1
    for number, fd in enumerate(descriptors, beyond):
        os.dup2(fd, number)
    os.closerange(3, beyond)
    for place, number in enumerate(numbers, beyond):
        os.dup2(place, number)
    os.closerange(beyond, os.sysconf("SC_OPEN_MAX"))
