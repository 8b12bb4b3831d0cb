"""Replace parts of vLLM; each hook names the line that it replaces.

The first process, which the user started, has a page: anonymous memory (memfd). Its descendants
open the page by a path in the environment, and append one line per report. When the first process
exits, it prints the first report, after all messages of vLLM.

Lines are those of vLLM 0.32.0, under ``vllm/``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from coordinator.plugins.switches import Switches

PAGE_VARIABLE: Final = "GROUP_COORDINATOR_PAGE"
"""The path of the page in /proc, valid while the first process runs."""


def keep_page() -> None:
    """Create a page for the processes that this process starts, unless it inherited one."""
    if PAGE_VARIABLE not in os.environ:
        fd = os.memfd_create("group-coordinator-page", os.MFD_CLOEXEC)
        os.environ[PAGE_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
        atexit.register(_print_the_end, os.getpid(), fd)


def report_end(end: str) -> None:
    """Append the reason why the engine ended; do nothing without a page."""
    path = os.environ.get(PAGE_VARIABLE)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the first process has exited
        return
    try:
        os.write(fd, msgspec.json.encode(end) + b"\n")
    finally:
        os.close(fd)


def _print_the_end(owner: int, fd: int) -> None:
    if os.getpid() != owner:
        return
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    if text:
        reason = msgspec.json.decode(text.splitlines()[0])
        sys.stdout.flush()
        print(f"vLLM's engine has ended: {reason}", file=sys.stderr, flush=True)  # noqa: T201


TESTED: Final = ("0.32.0",)
"""The versions of vLLM that the tests run."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One name in vLLM, and its replacement.

    Attributes:
        part: the switch that installs it.
        module: the module of vLLM that has the name.
        name: the name; a class's attribute after a dot.
        ours: ``module:name`` of the replacement.
        line: the file and line in vLLM that define or import the name.
        load: import the module to replace the name. False: replace the name only if the module is
            loaded; a later import of the module finds the replacement where the name is defined.
    """

    part: str
    module: str
    name: str
    ours: str
    line: str
    load: bool = True

    def install(self) -> None:
        """Replace the name."""
        if not self.load and self.module not in sys.modules:
            return
        holder: Any = importlib.import_module(self.module)
        *classes, last = self.name.split(".")
        for each in classes:
            holder = getattr(holder, each)
        module, _, ours = self.ours.partition(":")
        setattr(holder, last, getattr(importlib.import_module(module), ours))


_QUEUE = "coordinator.plugins.vllm.queue:MessageQueue"
_SHM_BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"

HOOKS: Final = (
    Hook(
        "queue",
        _SHM_BROADCAST,
        "MessageQueue",
        _QUEUE,
        "distributed/device_communicators/shm_broadcast.py:484: class MessageQueue:",
    ),
    Hook(
        "queue",
        "vllm.v1.executor.multiproc_executor",
        "MessageQueue",
        _QUEUE,
        "v1/executor/multiproc_executor.py:31: from vllm.distributed",
        load=False,
    ),
    Hook(
        "queue",
        "vllm.v1.executor.ray_executor_v2",
        "MessageQueue",
        _QUEUE,
        "v1/executor/ray_executor_v2.py:17: MessageQueue,",
        load=False,
    ),
    Hook(
        "communicator",
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator",
        "coordinator.plugins.vllm.communicator:CpuCommunicator",
        "distributed/device_communicators/cpu_communicator.py:20: class CpuCommunicator(",
    ),
    Hook(
        "status",
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.start_worker_monitor",
        "coordinator.plugins.vllm.liveness:start_worker_monitor",
        "v1/executor/multiproc_executor.py:299: def start_worker_monitor(",
    ),
)


def install(version: Callable[[], str] | None = None) -> frozenset[str]:
    """Install the enabled parts and return them; a second call has no effect.

    ``version`` returns vLLM's version. Raises ValueError for an unknown part, and
    UntestedVersionError for an untested version.
    """
    switches = Switches.from_environment()
    if switches.parts:
        switches.check_version("vLLM", version() if version else _version(), TESTED)
    for hook in HOOKS:
        if hook.part in switches.parts:
            hook.install()
    if "status" in switches.parts:
        keep_page()
    return switches.parts


def _version() -> str:
    import vllm  # noqa: PLC0415

    return str(vllm.__version__)
