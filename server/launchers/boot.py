"""The first moments of a local worker: a script of the standard library only.

It does, before anything slow is imported, what must hold from the first moment on:

- Life: the driver holds the other end of the lifeline, a pipe that nobody writes to. When the
  driver ends, however it ends, the kernel closes that end and sends SIGKILL to this worker's
  process group, whatever the worker is doing, be it inside a C call that keeps Python's lock. A
  thread watches the driver itself as well, should a child of the driver have kept the pipe open.
- Stacks: a signal makes the worker write its Python stack into a file that the driver reads, also
  while it is stuck; a crash writes it there too.
- An interrupt from the terminal is the driver's business.

Then it takes the driver's ``sys.path`` and becomes a worker.

It is run by path, so that no module of this package needs to be importable before.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import json
import os
import select
import signal
import struct
import sys
import threading

STACK_SIGNAL = signal.SIGRTMIN + 10
HELLO = b'{"type":"Hello"}'
"""A frame of the control channel, `server.messages.Hello`: the promises above hold from now on."""


def main() -> None:
    """Become the worker that the command line describes; see `server.launchers.local`."""
    control, lifeline, stacks, driver = map(int, sys.argv[1:5])
    signal.signal(signal.SIGINT, lambda *_: None)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    hold(lifeline, driver)
    try:
        os.write(control, struct.pack(">I", len(HELLO)) + HELLO)
    except BrokenPipeError:  # the driver has ended already
        os._exit(1)
    sys.path[:] = _receive(control)
    importlib.import_module("server.worker").main(control)


def hold(lifeline: int, driver: int) -> None:
    """End this process group with SIGKILL once the process ``driver`` ends.

    Args:
        lifeline: the reading end of a pipe whose only writing end the driver holds.
        driver: its process id.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    try:
        watched.register(os.pidfd_open(driver), select.POLLIN)
    except ProcessLookupError:
        _end()
    threading.Thread(target=_watch, args=(watched,), name="lifeline", daemon=True).start()


def _watch(watched: select.poll) -> None:
    watched.poll()
    _end()


def _end() -> None:
    os.killpg(0, signal.SIGKILL)


def _receive(control: int) -> list[str]:
    """The driver's ``sys.path``: one frame of the control channel."""
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
