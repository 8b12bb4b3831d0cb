"""What every rank of `benchmarks.collectives` does: obey rank 0, which measures.

`Collectives` is one system's way to do the work on arrays that are ready; a call is timed in
blocks, and its answer is compared afterwards.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank_processes import tie
from device_comm import Communicator, ShmBackend
from shm_broadcast import Board, BoardHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK_SECONDS = 0.002


class Collectives(Protocol):
    """One system. ``bind`` returns a call, and what it leaves as its result, or None."""

    def bind(self, verb: str, x: Tensor) -> tuple[Callable[[], Any], Tensor | None] | None:
        """The call for ``verb`` on ``x``; None if the system has no such verb."""

    def meet(self) -> None:
        """A barrier."""

    def agree(self, count: int) -> int:
        """Rank 0's ``count``, on all ranks."""


class Ours:
    """Shared memory: with results of its own, and into memory that is ready: ``out=``, in place."""

    def __init__(self, board: Board, path: str) -> None:
        backend = ShmBackend.create(board, range(board.n_members), _share(path))
        self._comm = Communicator(backend)

    def bind(self, verb: str, x: Tensor) -> tuple[Callable[[], Any], Tensor | None] | None:
        comm, n = self._comm, self._comm.world_size
        whole = x.new_empty(n * x.numel())
        part = x[: x.numel() // n].clone()
        first = whole if comm.rank == 0 else None
        other = whole[: x.numel()]
        calls: dict[str, tuple[Callable[[], Any], Tensor | None]] = {
            "all_reduce": (lambda: comm.all_reduce(x), None),
            "all_reduce_": (lambda: comm.all_reduce_(x), x),
            "all_gather": (lambda: comm.all_gather(x), None),
            "all_gather_": (lambda: comm.all_gather(x, out=whole), whole),
            "reduce_scatter_": (lambda: comm.reduce_scatter(x, out=part), part),
            "all_to_all_": (lambda: comm.all_to_all(x, out=other), None),
            "broadcast_": (lambda: comm.broadcast_(x), None),
            "reduce_": (lambda: comm.reduce(x, out=other if comm.rank == 0 else None), None),
            "gather_": (lambda: comm.gather(x, out=first), None),
            "scatter_": (lambda: comm.scatter(x if comm.rank == 0 else None, out=part), None),
            "send/recv": (self._ping(x), None),
            "barrier": (comm.barrier, None),
        }
        return calls.get(verb)

    def _ping(self, x: Tensor) -> Callable[[], Any]:
        comm = self._comm

        def ping() -> None:
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(out=x, src=1)
            elif comm.rank == 1:
                comm.recv(out=x, src=0)
                comm.send(x, 0)

        return ping

    def meet(self) -> None:
        self._comm.barrier()

    def agree(self, count: int) -> int:
        return int(self._comm.broadcast(torch.tensor([count])))


class Gloo:
    """torch.distributed on gloo, straight."""

    def __init__(self, rank: int, n: int, path: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"{path}-gloo", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        self._rank, self._n = rank, n

    def bind(self, verb: str, x: Tensor) -> tuple[Callable[[], Any], Tensor | None] | None:
        whole = x.new_empty(self._n * x.numel())
        part = x[: x.numel() // self._n].clone()
        root = self._rank == 0
        wholes, parts = list(whole.chunk(self._n)), list(x.chunk(self._n))
        other = whole[: x.numel()]
        calls: dict[str, tuple[Callable[[], Any], Tensor | None]] = {
            "all_reduce_": (lambda: dist.all_reduce(x), x),
            "all_gather_": (lambda: dist.all_gather(wholes, x), whole),
            "all_to_all_": (lambda: dist.all_to_all_single(other, x), None),
            "broadcast_": (lambda: dist.broadcast(x, 0), None),
            "reduce_": (lambda: dist.reduce(x, 0), None),
            "gather_": (lambda: dist.gather(x, wholes if root else None), None),
            "scatter_": (lambda: dist.scatter(part, parts if root else None), None),
            "send/recv": (self._ping(x), None),
            "barrier": (dist.barrier, None),
        }
        return calls.get(verb) or calls.get(f"{verb}_")

    def _ping(self, x: Tensor) -> Callable[[], Any]:
        def ping() -> None:
            if self._rank == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif self._rank == 1:
                dist.recv(x, 0)
                dist.send(x, 0)

        return ping

    def meet(self) -> None:
        dist.barrier()

    def agree(self, count: int) -> int:
        told = torch.tensor([count])
        dist.broadcast(told, 0)
        return int(told)


def measure(
    system: Collectives, rank: int, n: int, verb: str, dtype: str, size: int, seconds: float
) -> list[float] | None:
    """Seconds for each call, of blocks of calls, for about ``seconds``; None: no such verb.

    The ranks' values add up to zero, so that reductions in place can be repeated.
    """
    kind = DTYPES[dtype]
    x = torch.full((max(size // kind.itemsize, n),), rank - (n - 1) / 2, dtype=kind)
    bound = system.bind(verb, x)
    if bound is None:
        return None
    call, result = bound
    system.meet()
    started = time.perf_counter()
    call()
    once = time.perf_counter() - started
    block = system.agree(max(1, min(int(BLOCK_SECONDS / once), 500)))
    blocks = system.agree(max(3, min(int(seconds / (block * once)), 200)))
    samples = []
    answer: Tensor | None = None
    for _ in range(blocks):
        system.meet()
        started = time.perf_counter()
        for _ in range(block):
            answer = call()
        samples.append((time.perf_counter() - started) / block)
    found = answer if result is None else result
    if verb.startswith(("all_reduce", "all_gather", "reduce_scatter")) and found is not None:
        check(verb, found, n)
    return samples


def check(verb: str, result: Tensor, n: int) -> None:
    """Raise if a result is wrong."""
    if verb.startswith("all_gather"):
        expected = torch.arange(n).repeat_interleave(result.numel() // n) - (n - 1) / 2
    else:
        expected = torch.zeros(result.numel())
    if not torch.equal(result.float(), expected.float()):
        raise RuntimeError(f"{verb} is wrong")


def serve(
    rank: int,
    n: int,
    board: BoardHandle,
    path: str,
    names: Sequence[str],
    tied: bool,
    requests: Connection,
) -> None:
    """A rank's process: measure what the driver asks for, until it asks for nothing."""
    torch.set_num_threads(1)
    if tied:
        tie(rank, n)
    make: dict[str, Callable[[], Collectives]] = {
        "ours": lambda: Ours(Board.attach(board, rank), path),
        "gloo": lambda: Gloo(rank, n, path),
    }
    systems = {name: make[name]() for name in names}
    while (request := requests.recv()) is not None:
        name, *work = request
        requests.send(measure(systems[name], rank, n, *work))


def _share(path: str) -> Callable[[bytes | None], bytes]:
    def share(payload: bytes | None) -> bytes:
        place, there = Path(f"{path}-ours"), Path(f"{path}-there")
        if payload is not None:
            place.write_bytes(payload)
            there.touch()
        while not there.exists():
            time.sleep(0.001)
        return place.read_bytes()

    return share
