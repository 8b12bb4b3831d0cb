"""Fork servers that load nothing, for pools that a rank of a test starts, or a program.

A pool's fork server loads torch, which takes seconds, and a process that was forked itself starts
one of its own: two of them for each test of a pool over two hosts. A rank has loaded all of it
already, and so has a program (`tests.programs`). After `warm_fork_servers` its fork servers are
forked from it, as it was then, and run `server.launchers.forking` as they do otherwise.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

import server.worker  # noqa: F401 - what fork servers load
from server.launchers import fork_servers, forking

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

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

    start_cold = fork_servers.start_process

    def start(
        told: int, inherited: Sequence[int], environment: Mapping[str, str]
    ) -> _Forked | subprocess.Popen[bytes]:
        if os.getpid() != parent:
            return start_cold(told, inherited, environment)
        asked = json.dumps([list(inherited), dict(environment)]).encode()
        socket.send_fds(ours, [asked], [told, *inherited])
        return _Forked(int(ours.recv(64)))

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
    """Fork a fork server, as a child of ``parent``, whenever asked; end with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        request, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 8)
        if not request:
            return
        pid = forking._clone()
        if pid == 0:
            try:
                _become(descriptors, *json.loads(request))
            finally:
                os._exit(1)
        asked.send(str(pid).encode())
        for each in descriptors:
            os.close(each)


def _become(descriptors: list[int], inherited: list[int], environment: dict[str, Any]) -> None:
    """Be as a process that was started with these descriptors and variables, and serve."""
    os.setsid()
    _take([0, *inherited], descriptors)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()
    for category in _UNSEEN:
        warnings.simplefilter("ignore", category)
    threads = int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    if threads != torch.get_num_threads():  # to set it starts threads, but for one
        torch.set_num_threads(threads)
    sys.argv[:] = [str(forking.__file__)]
    forking.main()
    os._exit(0)


def _be_silent() -> None:
    """Hold no output open, which others may read to its end."""
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
