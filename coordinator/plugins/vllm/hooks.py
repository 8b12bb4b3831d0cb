"""All that takes the place of something of vLLM's, each with the line that it replaces.

The first process, which the user started, keeps a page of memory without a name. The others, which
are started by it, find the page by the environment and add a line for each thing that they tell.
When the first process exits it prints why the engine ended, after all messages of vLLM's own.

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
"""Where the page is: a path in /proc, while the first process lives."""


def keep_page() -> None:
    """Keep a page for the processes that this one starts, unless it was started by such a one.

    Collective: no.
    """
    if PAGE_VARIABLE not in os.environ:
        fd = os.memfd_create("group-coordinator-page", os.MFD_CLOEXEC)
        os.environ[PAGE_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
        atexit.register(_print_the_end, os.getpid(), fd)


def report_end(end: str) -> None:
    """Say why the engine ended; nothing without a page. Collective: no."""
    path = os.environ.get(PAGE_VARIABLE)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the first process has gone: nobody is left to tell
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
"""The versions of vLLM whose engine our tests have run."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One name of vLLM's, and what takes its place.

    Attributes:
        part: the switch that puts it in place.
        module: where vLLM has the name.
        name: the name; one of a class's attributes with a dot between.
        ours: ``module:name`` of what takes its place.
        line: the file and line in vLLM where it is defined or imported.
        load: import the module for this; otherwise it is replaced only where it is loaded by then,
            and a later import finds ours where the name is defined.
    """

    part: str
    module: str
    name: str
    ours: str
    line: str
    load: bool = True

    def install(self) -> None:
        """Replace the name. Collective: no."""
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
    """Put in place the parts that the environment asks for; the second time changes nothing.

    Args:
        version: tells vLLM's version; None: asks vLLM.

    Returns:
        The parts that are in place.

    Raises:
        ValueError: the variable names a part that does not exist.
        UntestedVersionError: vLLM is of another version than was tested.
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
