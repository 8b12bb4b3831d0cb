"""The first code in a local worker's process, and in a fork server, which forks such processes.

It uses the standard library only, and runs as a script, by its path, so no module of this package
has to be importable before. The argument is a JSON object; see `fork_servers` and `local`.

Before any slow import a worker's process sets up:

- The reaper: the process forks. The child becomes the worker. The parent, the reaper, is a child
  subreaper: it adopts every descendant whose own parent ends. When the worker or the driver has
  ended, the reaper kills all remaining descendants, also in other sessions, and then ends with the
  worker's exit status or signal.
- The lifeline: a pipe whose only writing end the driver holds, and never writes to. When the driver
  ends, the kernel closes that end and sends SIGKILL to the worker's process group, even if the
  worker is in a C call that holds the GIL. Another such pipe leads from the reaper to the worker.
- Stacks: on a signal, and on a crash, the worker writes its Python stack into a file for the
  driver.
- SIGINT from the terminal is ignored: the driver handles it.

A fork server has imported torch and this package, and of users' modules only `PoolConfig.preload`.
It has no thread and no CUDA context. Of the driver's descriptors it has only one end of a socket
pair for requests, and a lifeline. It clones a worker's reaper as a child of the driver, not of
itself: the driver waits for it and gets its exit status as of any child, even after the server's
end. Both the child and the server write the child's pid into a pipe, in case one of them is killed
in that moment.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

STACK_SIGNAL = signal.SIGRTMIN + 10
"""Equals that of `shm_broadcast.state.stacks`, which is not imported yet."""
END_SIGNAL = signal.SIGRTMIN + 11
"""Sent to the reaper: kill the worker and all its descendants."""
_PASSED_ON = (signal.SIGTERM, STACK_SIGNAL)
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 2.0
"""Longest wait of the reaper for killed processes; a system call may delay the end of one."""
_CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call clone(2), by machine."""
_CLONE_PARENT = 0x8000
_SCARCE = (errno.EAGAIN, errno.ENOMEM)
_LARGEST_REQUEST = 1 << 16
_N_DESCRIPTORS = 7
_LONGEST_REFUSAL = 600
"""Most characters of a refusal: a pipe takes it whole."""
_TASKS = Path("/proc/self/task")
_THREAD_SECONDS = 2.0
"""Longest time for which an ended thread is listed."""


def main() -> None:
    """Run the worker, or the fork server and its workers, that the command line describes."""
    settings = json.loads(sys.argv.pop())
    # If the driver ignores it, children would vanish before a wait.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[:] = settings["path"]
    driver, package = settings["driver"], settings["package"]
    if "requests" not in settings:
        run_worker(settings["inherited"], driver, package)
    elif inherited := serve_forks(settings):
        sys.path[:] = settings["path"]  # a preloaded module may have changed it
        run_worker(inherited, driver, package)
        _exit()


def run_worker(inherited: Sequence[int], driver: int, package: str) -> None:
    """Fork the worker, and become its reaper; ``inherited`` is as for `local.LocalWorker`."""
    control, lifeline, stacks = inherited
    try:
        reaper_alive, alive = os.pipe()
        worker = _fork_worker()
    except OSError as error:
        failed: dict[str, Any] = {"type": "Failed", "number": 0, "begun": [], "traceback": ""}
        failed |= {"kind": type(error).__name__, "message": str(error)}
        with suppress(BrokenPipeError):
            os.write(control, _frame(failed))
        os._exit(1)
    if worker:
        for fd in (control, stacks, reaper_alive):
            os.close(fd)
        _reap(worker, lifeline, driver)
    os.close(alive)
    signal.signal(signal.SIGINT, lambda *_: None)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    watched = select.poll()
    for pipe in (lifeline, reaper_alive):
        kill_at_close(pipe, -os.getpgrp())
        watched.register(pipe, select.POLLIN)
    if watched.poll(0):  # closed before `kill_at_close`
        os.killpg(0, signal.SIGKILL)
    try:
        os.write(control, _frame({"type": "Hello", "pid": os.getpid()}))
    except BrokenPipeError:  # the driver has ended already
        os._exit(1)
    import_for_good([f"{package}.worker"])
    sys.modules[f"{package}.worker"].main(control, stacks)


def import_for_good(modules: Iterable[str]) -> None:
    """Import modules, and exempt them from garbage collection.

    That saves a fifth of the time, and writes to pages that forked processes share.
    """
    gc.disable()
    try:
        for each in modules:
            importlib.import_module(each)
    finally:
        gc.freeze()
        gc.enable()


def retitle(title: str) -> None:
    """Set the command line that ``ps`` shows, cut to the length of the original one."""
    _, _, stat = Path("/proc/self/stat").read_bytes().rpartition(b")")
    begin, end = (int(word) for word in stat.split()[45:47])  # arg_start and arg_end of proc(5)
    room = end - begin
    if begin and room > 1:
        ctypes.memmove(begin, title.encode()[: room - 1].ljust(room, b"\0"), room)


def kill_at_close(pipe: int, owner: int) -> None:
    """Have the kernel send SIGKILL when the other end of ``pipe`` is closed.

    ``owner`` is a pid, or a process group's number, negated. An earlier close has no effect.
    """
    # O_ASYNC: the kernel needs no thread of this process.
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_ASYNC)


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) is refused here: {os.strerror(number)}")


def _rename(process: str) -> None:
    _prctl(_PR_SET_NAME, process.encode())


def _frame(message: dict[str, Any]) -> bytes:
    """Return a frame of the control channel with a message of `control.protocol`."""
    encoded = json.dumps(message).encode()
    return struct.pack(">I", len(encoded)) + encoded


def _fork_worker() -> int:
    """Fork; return the worker's pid in the reaper, and 0 in the worker, now in a new session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _rename("pool-reaper")
    # Blocked until the handlers are set: an early SIGTERM would end the reaper alone.
    signals = {*_PASSED_ON, END_SIGNAL, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        worker = os.fork()
    except OSError as error:
        raise OSError(error.errno, f"no process can be forked: {error.strerror}") from error
    if worker:
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(worker, number))
        signal.signal(END_SIGNAL, lambda *_: os.kill(worker, signal.SIGKILL))
        signal.signal(signal.SIGCHLD, lambda *_: _wait_for_adopted(worker))
    else:
        _rename("pool-worker")
        os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return worker


def _reap(worker: int, lifeline: int, driver: int) -> NoReturn:
    """Wait for the worker's or driver's end, kill all descendants, exit like the worker."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    with suppress(ProcessLookupError):
        watched.register(os.pidfd_open(worker), select.POLLIN)
        # A child of the driver may keep the lifeline open.
        watched.register(os.pidfd_open(driver), select.POLLIN)
        watched.poll()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, END_SIGNAL, signal.SIGCHLD})
    os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # exit by the same signal; the worker has written the core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wait_for_adopted(worker: int) -> None:
    """Wait for adopted processes that have ended, until the worker is next."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == worker:
                return
            os.waitpid(ended.si_pid, 0)


def _kill_descendants() -> None:
    """Kill all descendants, level by level: when a child ends, the reaper adopts its children."""
    until = time.monotonic() + _KILL_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for child in _children():
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def _children() -> list[int]:
    own_pid = str(os.getpid()).encode()
    children = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            _, _, stat = (process / "stat").read_bytes().rpartition(b")")  # after pid and name
            parent = stat.split()[1]  # after the state
            if parent == own_pid:
                children.append(int(process.name))
    return children


def serve_forks(settings: dict[str, Any]) -> list[int]:
    """Fork at each request; return a worker's descriptors in the child, and none at the end."""
    _rename("pool-forks")
    # If it is closed already, the request is the end of the file.
    kill_at_close(settings["lifeline"], os.getpid())
    refusal = load_workers_modules(settings["package"], settings["preload"])
    os.chdir("/")
    with socket.socket(fileno=settings["requests"]) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, _N_DESCRIPTORS)
            if not request:
                return []
            if refusal:
                _reply(descriptors[3], {"refusal": refusal[:_LONGEST_REFUSAL]})
            elif not _fork(descriptors[3]):
                break
            for fd in descriptors:
                os.close(fd)
    _rename("pool-reaper")
    os.close(settings["lifeline"])
    _take_over(json.loads(request), *descriptors[3:])
    return descriptors[:3]


def load_workers_modules(package: str, preload: list[str]) -> str:
    """Import what workers need. Returns why workers cannot be forked then, or ``""``."""
    try:
        import_for_good([f"{package}.worker", "coordinator.groups"])
        # torch's exit functions take 20 ms, and copy shared pages.
        for each in weakref.finalize._registry:  # type: ignore[attr-defined]
            each.atexit = False
        with sys.modules[f"{package}.control.reference"].import_guard():
            import_for_good(preload)
    except Exception as error:  # noqa: BLE001 - a worker that is spawned reports it
        return f"importing workers' modules failed: {type(error).__name__}: {error}"
    threads, uses_cuda = _after_a_fork()
    if threads > 1:
        return f"importing workers' modules has started threads: there are {threads}"
    if uses_cuda:
        return "importing workers' modules has used CUDA: forked processes cannot use it"
    return ""


def _after_a_fork() -> tuple[int, bool]:
    """Return the number of threads after a fork, and whether CUDA was used before.

    OpenBLAS, for one, ends its threads for a fork. CUDA does not work in a child of a process that
    has used it, if only to count devices, and torch refuses to try.
    """
    child = os.fork()
    if child == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())
    _, status = os.waitpid(child, 0)
    until = time.monotonic() + _THREAD_SECONDS
    while (threads := len([*_TASKS.iterdir()])) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    return threads, status != 0


def _fork(reply_fd: int) -> int:
    """Fork a child of the driver; return 0 in it. Both write the result into ``reply_fd``."""
    try:
        child = clone_sibling()
    except OSError as error:
        if error.errno in _SCARCE:
            _reply(reply_fd, {"errno": error.errno})
        else:
            _reply(reply_fd, {"refusal": f"a process cannot be cloned: {error}"})
        return -1
    _reply(reply_fd, {"pid": child or os.getpid()})
    return child


def clone_sibling() -> int:
    """Call fork with CLONE_PARENT: the new process is a child of the driver, our sibling.

    glibc's cached thread id is not updated. The reaper does not need it, and forks the worker
    normally.
    """
    library = ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock
    library.syscall.restype = ctypes.c_long
    clone = _CLONE.get(platform.machine(), -1)  # -1 is refused: ENOSYS
    flags = _CLONE_PARENT | signal.SIGCHLD
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


def _reply(reply_fd: int, result: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the driver has ended, or has the other's message
        os.write(reply_fd, json.dumps(result).encode() + b"\n")


def _take_over(variables: dict[str, str | None], reply_fd: int, folder: int, *output: int) -> None:
    """Take over the driver's current folder, output and variables, and reseed, in the child."""
    os.setsid()
    os.fchdir(folder)
    for name, number, fd in zip(("stdout", "stderr"), (1, 2), output, strict=True):
        os.dup2(fd, number)
        reopen(name, number)
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


def reopen(name: str, number: int) -> None:
    """Have `sys` write to the file that is now open as ``number``."""
    before = getattr(sys, name)
    now = open(  # noqa: SIM115 - for the life of the process
        number, "w", buffering=1, encoding=before.encoding, errors=before.errors, closefd=False
    )
    setattr(sys, name, now)
    setattr(sys, f"__{name}__", now)


def _exit() -> NoReturn:
    """Exit as a process forked by multiprocessing: join threads, run exit functions, no more.

    Finalizing the interpreter touches all objects, and so would copy shared pages.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
