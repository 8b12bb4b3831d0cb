"""Programs of tests, forked from a process that has loaded torch, which takes a second.

A program has a session and output of its own, and ends as Python does. It has no command line and
no main module: tests of these start Python.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from coordinator.daemon_threads import submit_in_thread
from server.launchers import boot
from tests.patience import PATIENCE_SECONDS
from tests.ranks import CONTEXT
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection


class Program:
    """A function that runs as a program; has what tests use of a `subprocess.Popen`.

    ``main`` is at the top level of a module that can be imported by its name.
    """

    def __init__(self, main: Callable[..., object], *arguments: str) -> None:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        theirs = [end for _, end in pipes]
        call = (main.__module__, main.__name__, arguments, *theirs, dict(os.environ))
        self._process = CONTEXT.Process(target=_run, args=call)
        self._process.start()
        for end in theirs:
            end.close()
        self.pid: int = self._process.pid or 0
        self.stdout, self.stderr = (_file(end, "r") for end, _ in pipes)

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        """Wait until it, and all that write to its output, have ended; the rest of its output."""
        said = ["", ""]
        if not self.stdout.closed:
            reading = [submit_in_thread(file.read, "read") for file in (self.stdout, self.stderr)]
            said = [each.result(timeout) for each in reading]
            self.stdout.close()
            self.stderr.close()
        self._process.join(timeout)
        return said[0], said[1]


def run_module(name: str, folder: str, *arguments: str) -> None:
    """Be ``python -m name`` with these arguments in ``folder``, as a `Program`."""
    os.chdir(folder)
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(path: str, lines: str, *arguments: str) -> None:
    """Be ``python path`` with these arguments and the file ``lines`` as input, as a `Program`."""
    sys.argv[1:] = arguments
    sys.path.insert(0, str(Path(path).parent))
    with Path(lines).open() as sys.stdin:
        runpy.run_path(path, run_name="__main__")


def _run(
    module: str,
    main: str,
    arguments: Sequence[str],
    stdout: Connection,
    stderr: Connection,
    environment: Mapping[str, str],
) -> NoReturn:
    gc.freeze()  # no collection looks among what the server had loaded
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [module, *arguments]
    for name, number, end in (("stdout", 1, stdout), ("stderr", 2, stderr)):
        os.dup2(end.fileno(), number)
        end.close()
        boot.reopen(name, number)
    warm_fork_servers()
    warnings.simplefilter("error")
    status = 0
    try:
        getattr(importlib.import_module(module), main)(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # noqa: BLE001 - it ends the program
        sys.excepthook(*sys.exc_info())
        status = 1
    ctypes.pythonapi.Py_Exit(status)
    raise RuntimeError("Python has not ended")


def _file(end: Connection, mode: str) -> Any:
    """What is at one end of a pipe, as text."""
    with end:
        return os.fdopen(os.dup(end.fileno()), mode)
