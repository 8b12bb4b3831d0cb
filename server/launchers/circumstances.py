"""What a worker takes over from its driver: only a fork server that was started in the same
circumstances can serve it.

A process inherits them when it starts. Many can be set later, but not all, and libraries read some
of them while they load: OpenMP its variables and the cores, Python its own. So none is set later,
but the folder, the output and `IDLE_VARIABLES`, which a fork server is told for each worker.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


class Circumstances(NamedTuple):
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
    def now(cls, environment: Mapping[str, str], preload: Sequence[str]) -> Circumstances:
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
