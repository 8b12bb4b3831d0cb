"""The script of a fork server: it loads the modules of every worker, and then forks workers.

The driver's side is `fork_servers`. The server has no thread and no CUDA context. Of the driver's
descriptors it has only one end of a socket pair for requests, and the lifeline, at whose close the
kernel kills it. It imports torch and this package, and of users' modules only
`PoolConfig.preload`.

A worker's reaper (see `boot`) is cloned as a child of the driver, not of the server: the driver
waits for it and gets its exit status as of any child, even after the server's end. Both the child
and the server write the child's pid into a pipe, in case one of them is killed in that moment.

The script is run by its path with the settings on standard input: a JSON object with the driver's
``path``, ``package`` and pid ``driver``, the modules to ``preload``, and the numbers ``requests``
and ``lifeline`` of the two descriptors. Each request carries the three descriptors of a worker
(`launchers.local`), the pipe's writing end, the current folder, standard output and error.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call clone(2), by machine."""
_CLONE_PARENT = 0x8000
_SCARCE = (errno.EAGAIN, errno.ENOMEM)
_LARGEST = 1 << 18
_N_DESCRIPTORS = 7
_TASKS = Path("/proc/self/task")
_THREAD_SECONDS = 2.0
"""Longest time for which an ended thread is listed."""


def main() -> None:
    """Serve until the driver ends or closes its end; in a forked child, become reaper or worker."""
    with open(0, "rb", closefd=False) as file:
        settings = json.loads(file.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path[:] = settings["path"]
    package: str = settings["package"]
    boot = importlib.import_module(f"{package}.launchers.boot")
    boot.rename("pool-forks")
    boot.hear_of_children()
    lifeline: int = settings["lifeline"]
    boot.end_with(lifeline, os.getpid())
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    try:
        driver = os.pidfd_open(settings["driver"])
    except ProcessLookupError:
        return
    watched.register(driver, select.POLLIN)
    if watched.poll(0):  # closed before `end_with`
        return
    refusal = _load(boot, package, settings["preload"])
    os.chdir("/")
    with socket.socket(fileno=settings["requests"]) as requests:
        watched.register(requests, select.POLLIN)
        descriptors = _serve(boot, requests, watched, refusal)
    if descriptors:
        os.close(lifeline)
        os.close(driver)
        sys.argv[:] = [str(boot.__file__), *map(str, (*descriptors, settings["driver"], package))]
        boot.main()
        _exit()


def _load(boot: ModuleType, package: str, preload: list[str]) -> str:
    """Import what workers need. Returns why workers cannot be forked then, or ``""``."""
    try:
        boot.import_for_good([f"{package}.worker", "coordinator.groups"])
        _keep_operators()
        with sys.modules[f"{package}.control.reference"].import_guard():
            boot.import_for_good(preload)
    except Exception as error:  # noqa: BLE001 - a worker that is spawned reports it
        return f"importing workers' modules failed: {type(error).__name__}: {error}"
    if platform.machine() not in _CLONE:
        return f"the number of clone(2) on {platform.machine()} is not known"
    threads, uses_cuda = _after_a_fork()
    if threads > 1:
        return f"importing workers' modules has started threads: there are {threads}"
    if uses_cuda:
        return "importing workers' modules has used CUDA: forked processes cannot use it"
    return ""


def _keep_operators() -> None:
    """Disable torch's exit functions: they take 20 ms, and copy shared pages."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False


def _after_a_fork() -> tuple[int, bool]:
    """Return the number of threads after a fork, and whether CUDA was used before.

    OpenBLAS, for one, ends its threads for a fork. CUDA does not work in a child of a process that
    has used it, if only to count devices, and torch refuses to try. Without threads and CUDA no
    fork is tried: it takes 12 ms.
    """
    torch = sys.modules["torch"]
    if len([*_TASKS.iterdir()]) == 1 and not torch.backends.cuda.is_built():
        return 1, False
    child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    _, status = os.waitpid(child, 0)
    until = time.monotonic() + _THREAD_SECONDS
    while (threads := len([*_TASKS.iterdir()])) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    return threads, status != 0


def _serve(
    boot: ModuleType, requests: socket.socket, watched: select.poll, refusal: str
) -> list[int]:
    """Fork at each request; return a worker's descriptors in the child, and none at the end."""
    while True:
        if any(fd != requests.fileno() for fd, _ in watched.poll()):
            return []
        request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, _N_DESCRIPTORS)
        if not request:
            return []
        if refusal:
            _report(descriptors[3], {"refusal": refusal})
        elif not _fork(descriptors[3]):
            boot.rename("pool-keeper")
            _take_over(json.loads(request), *descriptors[3:])
            return descriptors[:3]
        for fd in descriptors:
            os.close(fd)


def _fork(reply_fd: int) -> int:
    """Fork a child of the driver; return 0 in it. Both write the result into ``reply_fd``."""
    try:
        child = _clone()
    except OSError as error:
        if error.errno in _SCARCE:
            _report(reply_fd, {"errno": error.errno})
        else:
            _report(reply_fd, {"refusal": f"a process cannot be cloned: {error}"})
        return -1
    _report(reply_fd, {"pid": child or os.getpid()})
    return child


def _clone() -> int:
    """Call fork with CLONE_PARENT: the new process is a child of the driver, our sibling.

    glibc's cached thread id is not updated. The reaper does not need it, and forks the worker
    normally.
    """
    library = ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock
    library.syscall.restype = ctypes.c_long
    clone, flags = _CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    child: int = library.syscall(*map(ctypes.c_long, (clone, flags, 0, 0, 0, 0)))
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if child < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return child


def _report(reply_fd: int, result: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the driver has ended, or has the other's message
        os.write(reply_fd, json.dumps(result).encode() + b"\n")


def _take_over(variables: dict[str, str | None], reply_fd: int, folder: int, *output: int) -> None:
    """Take over the driver's current folder, output and variables, and reseed, in the child."""
    os.setsid()
    os.fchdir(folder)
    for name, number, fd in zip(("stdout", "stderr"), (1, 2), output, strict=True):
        os.dup2(fd, number)
        _reopen(name, number)
    for fd in (reply_fd, folder, *output):
        os.close(fd)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    importlib.invalidate_caches()  # a file may be newer than the server's list of its folder
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _exit() -> NoReturn:
    """Exit as a process forked by multiprocessing: join threads, run exit functions, no more.

    Finalizing the interpreter touches all objects, and so would copy shared pages.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _reopen(name: str, number: int) -> None:
    """Have `sys` write to the file that is now open as ``number``."""
    before = getattr(sys, name)
    by_line = name == "stderr" or os.isatty(number)
    now = open(  # noqa: SIM115 - for the life of the process
        number, "w", encoding=before.encoding, errors=before.errors, closefd=False
    )
    now.reconfigure(line_buffering=by_line, write_through=before.write_through)
    setattr(sys, name, now)
    setattr(sys, f"__{name}__", now)


if __name__ == "__main__":
    main()
