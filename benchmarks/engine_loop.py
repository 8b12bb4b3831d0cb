"""A small engine's loop, before and after its port: python -m benchmarks.engine_loop [--quick].

The loop has the form of nano-vllm's: rank 0 runs in the engine's process, sends each method and
its arguments to the other rank, and takes part in the step. Layers sum over the ranks twice each,
and the logits are gathered on rank 0. `docs/porting.md` describes the port.

Both sides compute the same model, with random weights, and must draw the same tokens.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, silu

import coordinator
from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.rank_processes import RankProcesses, tie

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

N = 2
HIDDEN, WIDE, LAYERS, VOCABULARY = 576, 1536, 30, 49152
"""As of SmolLM2-135M."""
SEQUENCES = (1, 8, 32)
REPEATS = 5
_ARGUMENT_BYTES = 1 << 20


class Loop(ABC):
    """One rank of an engine: sends methods to the others, or makes those that arrive."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        draw = torch.Generator().manual_seed(7)

        def part(rows: int, columns: int, dim: int) -> Tensor:
            whole = torch.randn(rows, columns, generator=draw) / columns**0.5
            return whole.chunk(N, dim)[rank].contiguous()

        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=draw)
        self.layers = [
            (
                part(HIDDEN, HIDDEN, 0),
                part(HIDDEN, HIDDEN, 1),
                part(WIDE, HIDDEN, 0),
                part(HIDDEN, WIDE, 1),
            )
            for _ in range(LAYERS)
        ]
        self.head = part(VOCABULARY, HIDDEN, 0)

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    @abstractmethod
    def send(self, method: str, *arguments: Any) -> None:
        """Send a call to the other ranks."""

    @abstractmethod
    def receive(self) -> tuple[str, list[Any]]:
        """Wait for a call of rank 0."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks, in place."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor | None:
        """Return the parts of all ranks, concatenated, on rank 0."""

    def call(self, method: str, *arguments: Any) -> Any:
        """On rank 0: run a method on all ranks; return its own result."""
        self.send(method, *arguments)
        return getattr(self, method)(*arguments)

    def serve(self) -> None:
        """On the other ranks: run methods until ``exit``."""
        while (call := self.receive())[0] != "exit":
            getattr(self, call[0])(*call[1])

    def step(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        """Compute the next token of each sequence."""
        x = self.embedding[[tokens[-1] for tokens in sequences]]
        for into, out, up, down in self.layers:
            x = x + self.reduce(linear(silu(linear(x, into)), out))
            x = x + self.reduce(linear(silu(linear(x, up)), down))
            x = x / x.norm(dim=-1, keepdim=True)
        logits = self.gather(linear(x, self.head))
        return [] if logits is None else logits.argmax(-1).tolist()


class Before(Loop):
    """A block of shared memory with a pickle, an event for each rank, and torch's gloo."""

    def __init__(self, rank: int, path: str, events: Sequence[Any]) -> None:
        super().__init__(rank)
        dist.init_process_group("gloo", store=dist.FileStore(path, N), rank=rank, world_size=N)
        self._events = events
        name = path.replace("/", "-").strip("-")
        if rank == 0:
            self._memory = SharedMemory(name, create=True, size=_ARGUMENT_BYTES)
        dist.barrier()
        if rank != 0:
            self._memory = SharedMemory(name)
        self._buffer = memoryview(self._memory.buf)

    def close(self) -> None:
        self._buffer.release()
        self._memory.close()
        if self.rank == 0:
            self._memory.unlink()

    def send(self, method: str, *arguments: Any) -> None:
        data = pickle.dumps([method, *arguments])
        self._buffer[:4] = len(data).to_bytes(4, "little")
        self._buffer[4 : 4 + len(data)] = data
        for event in self._events:
            event.set()

    def receive(self) -> tuple[str, list[Any]]:
        event = self._events[self.rank - 1]
        event.wait()
        size = int.from_bytes(self._buffer[:4], "little")
        method, *arguments = pickle.loads(self._buffer[4 : 4 + size])
        event.clear()
        return method, arguments

    def reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        parts = [torch.empty_like(x) for _ in range(N)] if self.rank == 0 else None
        dist.gather(x, parts, 0)
        return None if parts is None else torch.cat(parts, -1)


class After(Loop):
    """A tensor-parallel group."""

    def __init__(self, rank: int, path: str) -> None:
        super().__init__(rank)
        store = dist.FileStore(path, N)
        self.groups = coordinator.init(tp=N, rank=rank, store=store)
        self.tp = self.groups.tp
        self.tp.start_broadcaster()

    def close(self) -> None:
        self.groups.close()

    def send(self, method: str, *arguments: Any) -> None:
        self.tp.broadcast_object([method, *arguments])

    def receive(self) -> tuple[str, list[Any]]:
        method, *arguments = self.tp.broadcast_object()
        return method, arguments

    def reduce(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce_(x)

    def gather(self, x: Tensor) -> Tensor | None:
        return self.tp.gather(x, 0)


LOOPS = {"ours": After, "before the port": Before}


def serve(rank: int, kind: type[Loop], arguments: Sequence[Any], requests: Connection) -> None:
    """A rank's process: take part in what is asked for, until nothing is."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    tie(rank, N)
    loop = kind(rank, *arguments)
    while (request := requests.recv()) is not None:
        if rank != 0:
            loop.serve()
            requests.send(None)
            continue
        n, steps = request
        sequences = [[index] for index in range(n)]
        samples = []
        for _ in range(steps):
            began = time.perf_counter()
            drawn = loop.call("step", sequences)
            samples.append(time.perf_counter() - began)
            for tokens, token in zip(sequences, drawn, strict=True):
                tokens.append(token)
        loop.send("exit")
        requests.send((samples, sequences))
    loop.close()


def take(report: Report, steps: int) -> None:
    """Measure both loops in turn, for each number of sequences."""
    context = multiprocessing.get_context("forkserver")
    with ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="engine-loop-"))
        given: dict[str, tuple[Any, ...]] = {
            "ours": (f"{folder}/ours",),
            "before the port": (f"{folder}/before", [context.Event() for _ in range(1, N)]),
        }
        ranks = {
            name: closing.enter_context(RankProcesses(N, serve, LOOPS[name], given[name]))
            for name in LOOPS
        }
        for n in SEQUENCES:
            drawn = [each.ask(n, 8)[1] for each in ranks.values()]
            if drawn[0] != drawn[1]:
                raise SystemExit("the loops have drawn different tokens")
            systems = {name: partial(_samples, each, n, steps) for name, each in ranks.items()}
            label = f"{n} sequences"
            report.measure(Figure("engine loop, a step", label, systems, "ms", REPEATS))


def _samples(ranks: RankProcesses, n: int, steps: int) -> list[float]:
    samples, _ = ranks.ask(n, steps)
    return list(samples)


def main() -> None:
    """Run the command line."""
    options = parser(__doc__ or "").parse_args()
    report = Report(machine())
    take(report, 20 if options.quick else 100)
    report.finish(options)


if __name__ == "__main__":
    main()
