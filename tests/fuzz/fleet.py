"""Ranks that carry out one example after the other, over shared memory or torch process groups."""

from __future__ import annotations

import pickle
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import psutil
import torch

from coordinator import GroupCoordinator, StatelessGroupCoordinator
from tests.fuzz.generate import ENDED, STOPPED_SECONDS
from tests.patience import NAMED_WITHIN, STALL_SECONDS, until
from tests.ranks import CONTEXT, init_gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fuzz.generate import Fault

TRANSPORTS = ("shm", "torch")
START_SECONDS = 180.0
"""For processes that import torch, on a machine that has others to run."""
EXAMPLE_SECONDS = 60.0
"""For what takes milliseconds, on a machine that may stall."""
FAULT_SECONDS = NAMED_WITHIN + 2 * STALL_SECONDS
"""For all ranks to hear of a fault, each perhaps from one that has just heard of it."""


@dataclass(frozen=True)
class Post:
    rank: int
    n: int
    folder: Path
    make_group: Callable[..., GroupCoordinator]
    """Makes the group of a kind, by its name and all its members, that this rank is in."""


class Rank(Protocol):
    def __init__(self, post: Post) -> None: ...

    def run(self, example: Any, fault: Fault | None, /) -> str:
        """Take part in an example; what went wrong first, or ``""``."""


class Fleet:
    """``n`` ranks of one transport. Use it in a ``with`` block."""

    def __init__(self, rank_type: type[Rank], n: int, transport: str) -> None:
        self.n, self.transport = n, transport
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._pipes, self._processes = [], []
        for rank in range(n):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(rank_type, rank, n, transport, self._folder.name, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        told = {rank: text for rank, text in self._answers(START_SECONDS).items() if text}
        self.broken = bool(told)
        if told:
            self.__exit__()
            raise RuntimeError(f"{n} ranks do not start over {transport}: {told}")

    def run(self, example: object, fault: Fault | None) -> dict[int, str]:
        seconds = EXAMPLE_SECONDS if fault is None else FAULT_SECONDS
        data = pickle.dumps((example, fault))
        for pipe in self._pipes:
            pipe.send_bytes(data)
        if fault is not None and fault.kind == "stop":
            self._continue(fault.rank)
        wrong = {rank: text for rank, text in self._answers(seconds).items() if text}
        self.broken = bool(wrong)
        return wrong if fault is None else fault.unjustified(wrong)

    def _continue(self, rank: int) -> None:
        process = psutil.Process(self._processes[rank].pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED or self._pipes[rank].poll())
        time.sleep(STOPPED_SECONDS)
        process.resume()

    def _answers(self, seconds: float) -> dict[int, str]:
        found: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), seconds)
            for pipe in ready:
                rank = waiting.pop(pipe)
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


def _serve(
    rank_type: type[Rank], rank: int, n: int, transport: str, folder: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    with ExitStack() as closing:

        def make_group(
            name: str, members: Sequence[Sequence[int]], queue: bool = False, store: Any = None
        ) -> GroupCoordinator:
            options = (rank, "gloo", transport != "torch")
            if store is None:
                return closing.enter_context(GroupCoordinator(members, *options, queue, name))
            named = {"global_rank": rank}
            return closing.enter_context(
                StatelessGroupCoordinator(members, *options, store, queue, name, **named)
            )

        try:
            init_gloo(rank, n, f"{folder}/store", START_SECONDS)
            me = rank_type(Post(rank, n, Path(folder), make_group))
            pipe.send("")
        except Exception:  # noqa: BLE001 - told to whoever started it
            pipe.send(traceback.format_exc())
            return
        while True:
            try:
                example, fault = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send(me.run(example, fault))
