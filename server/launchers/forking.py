"""The script of a fork server: it loads what every worker needs, and then forks workers.

The driver's side is `fork_servers`. The server has no thread, no CUDA context and no descriptor of
the driver's but one end of a socket pair, over which it is asked, and the lifeline, at whose
closing the kernel kills it. It imports torch and this package, and nothing of the user's but what
`PoolConfig.preload` names.

A worker's keeper (see `boot`) is cloned as a child of the driver, not of the server: the driver
waits for it and learns its exit status as if it had started it itself, whatever becomes of the
server. The newborn says over a pipe which pid it has; so does the server, in case one of both is
killed in that moment.

It is run by its path with the settings on standard input: a JSON object with the driver's
``path``, ``package`` and ``driver``, its pid, the modules to ``preload``, and the numbers
``requests`` and ``lifeline`` of the two descriptors. With each request come the four descriptors of
a worker (`launchers.local`), the pipe's writing end, the current folder, standard output and error.
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
_N_DESCRIPTORS = 8
_TASKS = Path("/proc/self/task")
_THREAD_SECONDS = 2.0
"""How long a thread that has ended may still be listed."""


def main() -> None:
    """Serve until the driver ends or closes its end; in a newborn, keep or be the worker."""
    with open(0, "rb", closefd=False) as told:
        settings = json.loads(told.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
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
    if watched.poll(0):  # closed before the kernel was told to look at it
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
        _leave()


def _load(boot: ModuleType, package: str, preload: list[str]) -> str:
    """Import what workers need. Returns why workers cannot be forked then, or ``""``."""
    try:
        boot.import_for_good([f"{package}.worker", "coordinator.groups"])
        _keep_operators()
        with sys.modules[f"{package}.control.reference"].import_guard():
            boot.import_for_good(preload)
    except Exception as error:  # noqa: BLE001 - a worker that is spawned reports it
        return f"importing what workers need failed: {type(error).__name__}: {error}"
    if platform.machine() not in _CLONE:
        return f"the number of clone(2) on {platform.machine()} is not known"
    threads, uses_cuda = _after_a_fork()
    if threads > 1:
        return f"importing what workers need has started threads: there are {threads}"
    if uses_cuda:
        return "importing what workers need has asked CUDA for its devices: no fork can use it then"
    return ""


def _keep_operators() -> None:
    """Have no exit function take apart what torch has registered while it was loaded.

    Every worker would, operator by operator: 20 ms of a core, in which it copies what is shared.
    """
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False


def _after_a_fork() -> tuple[int, bool]:
    """How many threads there are after a fork, and whether CUDA was in use before it.

    OpenBLAS ends its threads for a fork, for one. CUDA does not work in a child of who has used it,
    if only to ask for the devices, and torch refuses to try. Where there is neither, no fork is
    tried: it takes 12 ms.
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
    """Fork as asked. Returns a worker's descriptors in a newborn, and none at the end."""
    while True:
        if any(fd != requests.fileno() for fd, _ in watched.poll()):
            return []
        request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, _N_DESCRIPTORS)
        if not request:
            return []
        if refusal:
            _tell(descriptors[4], {"refusal": refusal})
        elif not _fork(descriptors[4]):
            boot.rename("pool-keeper")
            _become(json.loads(request), *descriptors[4:])
            return descriptors[:4]
        for fd in descriptors:
            os.close(fd)


def _fork(birth: int) -> int:
    """Fork a child of the driver. Returns 0 in it; both say to ``birth`` what has happened."""
    try:
        newborn = _clone()
    except OSError as error:
        if error.errno in _SCARCE:
            _tell(birth, {"errno": error.errno})
        else:
            _tell(birth, {"refusal": f"a process cannot be cloned: {error}"})
        return -1
    _tell(birth, {"pid": newborn or os.getpid()})
    return newborn


def _clone() -> int:
    """As `os.fork`, but the child is the parent's, and so this process's sibling.

    The C library is not told: a thread's own id that it has stored stays the server's. Nothing in
    the keeper needs it, and the worker is forked from it in the usual way.
    """
    library = ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock
    library.syscall.restype = ctypes.c_long
    clone, flags = _CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    newborn: int = library.syscall(*map(ctypes.c_long, (clone, flags, 0, 0, 0, 0)))
    if newborn == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if newborn < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return newborn


def _tell(birth: int, what: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the driver is gone, or knows already
        os.write(birth, json.dumps(what).encode() + b"\n")


def _become(variables: dict[str, str | None], birth: int, folder: int, *output: int) -> None:
    """In the newborn: take over what the driver has now, and what only new processes have."""
    os.setsid()
    os.fchdir(folder)
    for name, number, fd in zip(("stdout", "stderr"), (1, 2), output, strict=True):
        os.dup2(fd, number)
        _reopen(name, number)
    for fd in (birth, folder, *output):
        os.close(fd)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    importlib.invalidate_caches()  # a file may have come since the server listed its folder
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _leave() -> NoReturn:
    """End as a process that multiprocessing has forked: threads, exit functions, and no more.

    Taking the interpreter apart touches all objects, and so would copy what is shared.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _reopen(name: str, number: int) -> None:
    """Have `sys` write to what is now open as ``number``; its file knows what was before."""
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
