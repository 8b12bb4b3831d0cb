"""The first code in a local worker's process. It uses the standard library only.

Before any slow import it sets up:

- The lifeline: a pipe whose only writing end the driver holds, and never writes to. When the driver
  ends, the kernel closes that end and sends SIGKILL to this worker's process group, even if the
  worker is in a C call that holds the GIL. A thread also watches the driver's process, in case a
  child of the driver keeps the pipe open.
- The keeper: the process forks. The child becomes the worker. The parent, the keeper, is a child
  subreaper: it adopts every descendant whose own parent ends. When the worker or the driver has
  ended, the keeper kills all remaining descendants, also in other sessions, and then ends with the
  worker's exit status or signal.
- Stacks: on a signal, and on a crash, the worker writes its Python stack into a file for the
  driver.
- SIGINT from the terminal is ignored: the driver handles it.

Then it receives the driver's ``sys.path`` and runs the worker's main function.

A spawned worker runs this file as a script, by its path, so no module of this package has to be
importable before. A forked one (`forking`) calls `main` with the same command line.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

STACK_SIGNAL = signal.SIGRTMIN + 10
"""Equals that of `shm_broadcast.state.stacks`, which is not imported yet."""
END_SIGNAL = signal.SIGRTMIN + 11
"""Sent to the reaper: kill the worker and all its descendants."""
_PASSED_ON = (signal.SIGTERM, STACK_SIGNAL)
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 2.0
"""Longest wait of the reaper for killed processes; a system call may delay the end of one."""


def main() -> None:
    """Become the worker that the command line describes; see `launchers.local`."""
    control, lifeline, stacks, driver = map(int, sys.argv[1:5])
    package = sys.argv[5]
    keeper = os.getpid()
    hear_of_children()
    with telling(control):
        worker = split_off_keeper()
    if worker:
        for fd in (control, stacks):
            os.close(fd)
        keep(worker, lifeline, driver)
    signal.signal(signal.SIGINT, lambda *_: None)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    with telling(control):
        hold(lifeline, driver, keeper)
    try:
        os.write(control, frame({"type": "Hello", "pid": os.getpid()}))
    except BrokenPipeError:  # the driver has ended already
        os._exit(1)
    sys.path[:] = _receive(control)
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


def hear_of_children() -> None:
    """Reset SIGCHLD: if the driver ignores it, children would vanish before a wait."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def rename(process: str) -> None:
    """Set the name of this process, at most 15 characters."""
    prctl(_PR_SET_NAME, process.encode())


def retitle(title: str) -> None:
    """Set the command line that ``ps`` shows, cut to the length of the original one."""
    _, _, stat = Path("/proc/self/stat").read_bytes().rpartition(b")")
    begin, end = (int(word) for word in stat.split()[45:47])  # arg_start and arg_end of proc(5)
    room = end - begin
    if begin and room > 1:
        ctypes.memmove(begin, title.encode()[: room - 1].ljust(room, b"\0"), room)


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2), or raise OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) is refused here: {os.strerror(number)}")


@contextmanager
def telling(control: int) -> Iterator[None]:
    """Report an OSError or RuntimeError of the block to the driver, and exit."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        failed = {"type": "Failed", "number": 0, "begun": [], "traceback": ""}
        with suppress(BrokenPipeError):
            os.write(
                control, frame({**failed, "kind": type(error).__name__, "message": str(error)})
            )
        os._exit(1)


def frame(message: dict[str, object]) -> bytes:
    """Return a frame of the control channel with a message of `control.protocol`."""
    encoded = json.dumps(message).encode()
    return struct.pack(">I", len(encoded)) + encoded


def split_off_keeper() -> int:
    """Fork; return the worker's pid in the reaper, and 0 in the worker, now in a new session."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    rename("pool-keeper")
    # Blocked until the handlers are set: an early SIGTERM would end the reaper alone.
    signals = {*_PASSED_ON, END_SIGNAL, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    worker = fork()
    if worker:
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(worker, number))
        signal.signal(END_SIGNAL, lambda *_: os.kill(worker, signal.SIGKILL))
        signal.signal(signal.SIGCHLD, lambda *_: _reap(but=worker))
    else:
        rename("pool-worker")
        os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return worker


def fork() -> int:
    """Call `os.fork`; an error says that forking was refused."""
    try:
        return os.fork()
    except OSError as error:
        raise OSError(error.errno, f"no process can be forked: {error.strerror}") from error


def keep(worker: int, lifeline: int, driver: int) -> NoReturn:
    """Wait for the worker's or driver's end, kill all descendants, exit like the worker."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    with suppress(ProcessLookupError):
        watched.register(os.pidfd_open(worker), select.POLLIN)
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


def _reap(but: int) -> None:
    """Reap adopted processes that have ended, until ``but`` is next."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
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


def hold(lifeline: int, driver: int, keeper: int) -> None:
    """Kill this process group by SIGKILL when process ``driver`` or ``keeper`` ends."""
    end_with(lifeline, -os.getpgrp())
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    try:
        for process in (driver, keeper):
            watched.register(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        _end()
    threading.Thread(target=_watch, args=(watched,), name="lifeline", daemon=True).start()


def end_with(lifeline: int, owner: int) -> None:
    """Have the kernel send SIGKILL when the other end of pipe ``lifeline`` is closed.

    ``owner`` is a pid, or a process group's number, negated. An earlier close has no effect.
    """
    # O_ASYNC: the kernel needs no thread of this process.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, owner)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _watch(watched: select.poll) -> None:
    watched.poll()
    _end()


def _end() -> None:
    os.killpg(0, signal.SIGKILL)


def _receive(control: int) -> list[str]:
    """Receive the driver's ``sys.path``: one frame of the control channel."""
    (size,) = struct.unpack(">I", _read(control, 4))
    path: list[str] = json.loads(_read(control, size))
    return path


def _read(control: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = os.read(control, size - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            _end()
        data += more
    return data


if __name__ == "__main__":
    main()
