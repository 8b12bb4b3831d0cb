"""Run a function on n ranks, each a real process, and get its results or its tracebacks.

    def body(rank: int, n: int, path: str) -> int: ...        # at module level
    assert run_ranks(2, body, str(tmp_path / "store")) == [0, 1]

Ranks are forked from a server that has loaded torch: a rank costs milliseconds. So it sees the
environment variables of the moment when the tests began; ``environment=`` starts fresh
interpreters, which cost seconds. Arguments and results are pickled. Warnings are errors in a rank.
A rank that is done stays alive until all are.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from shm_broadcast import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

_DUMP_SIGNAL = signal.SIGUSR1
"""Has a rank write its stacks, then end: they are whole once it has."""

_GRACE = 10.0
"""Seconds the others have left once one rank failed: time to say what they saw of it."""

CONTEXT = multiprocessing.get_context("forkserver")

PRELOADED = (
    "tests.brief_spin",
    *("numpy", "torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"),
    *("torch.testing", "pytest", "hypothesis", "psutil", "cupy"),
    *("coordinator", "coordinator.compat.vllm", "coordinator.layout", "coordinator.pipeline"),
    *("device_comm.cuda.ipc.ipc_backend", "device_comm.cuda.nccl.nccl_backend"),
    *("device_comm.cuda.symmetric_backend", "device_comm.selection"),
    *("server.worker", "server.commands.serve", "starlette", "uvicorn"),
    "tests.huge_pages",
)
"""What the fork server imports, as far as it is installed."""

CONTEXT.set_forkserver_preload(list(PRELOADED))

NEW_BOARD: Final[Any] = object()
"""As an argument of `run_ranks`: the handle of a new board, of which rank i can be member i."""


class RanksFailedError(AssertionError):
    """Some ranks raised, died or hung; ``failures`` maps each to its traceback or stacks."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__(
            "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
        )


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 100.0,
    may_die: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, n, *args)`` in n processes; return the results by rank.

    Args:
        n: how many ranks.
        fn: a function at the top level of its module.
        args: picklable, or `NEW_BOARD`.
        timeout: seconds; then the stacks of all that run are dumped, and they are killed.
        may_die: ranks whose process may end without a result, which is None then.
        environment: variables that the ranks have before they import anything.

    Raises RanksFailedError if a rank raised, died or did not end in time.
    """
    ranks: list[_Rank] = []
    context = CONTEXT if environment is None else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ExitStack() as boards:
        given = [
            boards.enter_context(Board.create(n, None)).handle() if each is NEW_BOARD else each
            for each in args
        ]
        call = pickle.dumps((_Function.of(fn), pickle.dumps(given)))
        try:
            with pytest.MonkeyPatch.context() as variables:
                for name, value in (environment or {}).items():
                    variables.setenv(name, value)
                for rank in range(n):
                    started = _Rank.start(context, rank, n, call, Path(folder), timeout)
                    ranks.append(started)
            failures = _collect(ranks, time.monotonic() + timeout, may_die)
        finally:
            for each in ranks:
                each.end()
    if failures:
        raise RanksFailedError(failures)
    return [each.result for each in ranks]


def init_gloo(rank: int, n: int, path: str, timeout: float = 30.0) -> dist.ProcessGroup:
    """Make gloo the default process group, over the new file ``path``; return the world group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=timeout),
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch made no default process group")
    return group


@dataclass(frozen=True)
class _Function:
    """A function by module, file and name, which a process needs to load it."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> _Function:
        if "<locals>" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is not at the top level of its module")
        file = sys.modules[fn.__module__].__file__
        if file is None:
            raise ValueError(f"module {fn.__module__} has no file")
        return cls(fn.__module__, file, fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        module = sys.modules.get(self.module)
        if module is None:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {self.file}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass
class _Rank:
    rank: int
    process: BaseProcess
    connection: Connection
    stacks: Path
    result: Any = None

    @classmethod
    def start(
        cls,
        context: ForkServerContext | SpawnContext,
        rank: int,
        n: int,
        call: bytes,
        folder: Path,
        timeout: float,
    ) -> _Rank:
        ours, theirs = context.Pipe()
        stacks = folder / f"stacks-{rank}"
        process = context.Process(
            target=_run_rank, args=(theirs, rank, n, call, str(stacks), timeout), daemon=True
        )
        process.start()
        theirs.close()
        return cls(rank, process, ours, stacks)

    def receive(self, may_die: bool) -> str | None:
        """Take the result; return what went wrong, if anything did."""
        try:
            reply = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            return None if may_die else f"the process ended without a result (exit code {code})"
        done, value = pickle.loads(reply)
        if not done:
            return str(value)
        self.result = value
        return None

    def dump(self) -> str:
        """The Python stacks of a rank that does not end."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, _DUMP_SIGNAL)
        self.process.join(_GRACE)
        stacks = self.stacks.read_text() if self.stacks.exists() else ""
        if stacks:
            return "still running at the end of its time:\n" + stacks
        return "still running at the end of its time, and shows no stacks (stopped?)"

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()


def _collect(ranks: Sequence[_Rank], end: float, may_die: Collection[int]) -> dict[int, str]:
    waiting = {each.connection: each for each in ranks}
    failures: dict[int, str] = {}
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            each = waiting.pop(connection)
            wrong = each.receive(each.rank in may_die)
            if wrong is not None:
                failures[each.rank] = wrong
                end = min(end, time.monotonic() + _GRACE)
    for each in waiting.values():
        failures[each.rank] = each.dump()
        each.process.kill()
    return failures


def _run_rank(
    connection: Connection, rank: int, n: int, call: bytes, stacks: str, timeout: float
) -> None:
    gc.freeze()  # no collection looks among what the server had loaded
    with Path(stacks).open("w") as file:
        faulthandler.register(_DUMP_SIGNAL, file=file, all_threads=True, chain=True)
        faulthandler.dump_traceback_later(timeout + 2 * _GRACE, exit=True)  # if the parent is gone
        warnings.simplefilter("error")
        torch.set_num_threads(1)
        try:
            function, args = pickle.loads(call)
            fn = function.load()
            reply = pickle.dumps((True, fn(rank, n, *pickle.loads(args))))
        except BaseException:  # noqa: BLE001 - all that ends a rank is told to the parent
            reply = pickle.dumps((False, traceback.format_exc()))
        try:
            connection.send_bytes(reply)
            connection.recv_bytes()
        except (EOFError, OSError):
            pass
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(_DUMP_SIGNAL)
