"""Ranks that carry out one program after the other.

Each fleet has a transport: ``shm`` (shared memory), ``python`` (the same without the C extension),
``torch`` (torch process groups). A fleet in which a program went wrong is ended and made anew.
"""

from __future__ import annotations

import pickle
import tempfile
import time
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import torch

from coordinator import GroupCoordinator
from device_comm.shm import shm_backend as shm_comm
from tests.fuzz.execute import Execution
from tests.fuzz.faults import ENDED, STOPPED_SECONDS
from tests.fuzz.program import groups_of
from tests.patience import NAMED_WITHIN, STALL_SECONDS, until
from tests.ranks import CONTEXT, init_gloo

if TYPE_CHECKING:
    from tests.fuzz.faults import Fault
    from tests.fuzz.program import Program

TRANSPORTS = ("shm", "python", "torch")
START_SECONDS = 60.0
PROGRAM_SECONDS = 60.0
"""For a program that takes milliseconds, on a machine that may stall."""
FAULT_SECONDS = NAMED_WITHIN + 2 * STALL_SECONDS
"""For all ranks to hear of a fault, each perhaps from one that has just heard of it."""


class Fleet:
    """``n`` ranks of one transport. Use it in a ``with`` block."""

    def __init__(self, n: int, transport: str) -> None:
        self.n, self.transport = n, transport
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        path = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(n):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(rank, n, transport, path, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.broken = any(self._answers(START_SECONDS).values())

    def run(self, program: Program, fault: Fault | None = None) -> dict[int, str]:
        """Carry out a program, in which something may happen; what went wrong, by rank."""
        seconds = PROGRAM_SECONDS if fault is None else FAULT_SECONDS
        data = pickle.dumps((program, fault))
        for pipe in self._pipes:
            pipe.send_bytes(data)
        if fault is not None and fault.kind == "stop":
            self._continue(fault.rank)
        wrong = {rank: text for rank, text in self._answers(seconds).items() if text}
        self.broken = bool(wrong)
        return wrong if fault is None else fault.unjustified(wrong)

    def _continue(self, rank: int) -> None:
        """Wait for a rank to have stopped itself, and for a while longer; then let it go on."""
        process = psutil.Process(self._processes[rank].pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED or self._pipes[rank].poll())
        time.sleep(STOPPED_SECONDS)
        process.resume()

    def _answers(self, seconds: float) -> dict[int, str]:
        """What each rank says, or that it says nothing."""
        found: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), seconds)
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    found[rank] = self._pipes[rank].recv()
                except EOFError:
                    found[rank] = ENDED
            if not ready:
                return found | dict.fromkeys(waiting.values(), f"nothing for {seconds} s")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0 if self.broken else 10)
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, n: int, transport: str, path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if transport == "python":
        shm_comm.native = None
    with ExitStack() as closing:
        try:
            init_gloo(rank, n, path, START_SECONDS)
            groups = {}
            for name, members in groups_of(n).items():
                if any(rank in ranks for ranks in members):
                    group = GroupCoordinator(
                        members, rank, "gloo", transport != "torch", group_name=name
                    )
                    groups[name] = closing.enter_context(group)
            pipe.send("")
        except Exception:  # noqa: BLE001 - told to whoever started it
            pipe.send(traceback.format_exc())
            return
        while True:
            try:
                program, fault = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send(Execution(groups).run(program, fault))
