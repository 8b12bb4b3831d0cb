"""MPI's ranks of `benchmarks.collectives`: mpiexec -n N python -m benchmarks.collective_mpi.

Rank 0 reads requests, one JSON list a line, and prints ``samples [...]``. bf16 is left out: MPI has
no such type to reduce.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from benchmarks.child import ANSWER
from benchmarks.collective_ranks import measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Mpi:
    """mpi4py on buffers."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def bind(self, verb: str, x: Tensor) -> tuple[Callable[[], object], Tensor | None] | None:
        comm, n, rank = self._comm, self._comm.size, self._comm.rank
        if x.dtype != torch.float32:
            return None
        whole = x.new_empty(n * x.numel())
        part = x[: x.numel() // n].clone()
        a, w, p = x.numpy(), whole.numpy(), part.numpy()
        equal = a[: p.size * n]
        other = w[: p.size * n]
        calls: dict[str, tuple[Callable[[], object], Tensor | None]] = {
            "all_reduce_": (lambda: comm.Allreduce(MPI.IN_PLACE, a), x),
            "all_gather_": (lambda: comm.Allgather(a, w), whole),
            "reduce_scatter_": (lambda: comm.Reduce_scatter_block(equal, p), part),
            "all_to_all_": (lambda: comm.Alltoall(equal, other), None),
            "broadcast_": (lambda: comm.Bcast(a), None),
            "reduce_": (lambda: comm.Reduce(a, w[: a.size] if rank == 0 else None), None),
            "gather_": (lambda: comm.Gather(a, w if rank == 0 else None), None),
            "scatter_": (lambda: comm.Scatter(equal if rank == 0 else None, p), None),
            "send/recv": (self._ping(a), None),
            "barrier": (comm.Barrier, None),
        }
        return calls.get(verb) or calls.get(f"{verb}_")

    def _ping(self, a: Any) -> Callable[[], object]:
        comm = self._comm

        def ping() -> None:
            if comm.rank == 0:
                comm.Send(a, 1)
                comm.Recv(a, 1)
            elif comm.rank == 1:
                comm.Recv(a, 0)
                comm.Send(a, 0)

        return ping

    def meet(self) -> None:
        self._comm.Barrier()

    def agree(self, count: int) -> int:
        return int(self._comm.bcast(count))


def wait_quietly(comm: Any) -> None:
    """A barrier that leaves the cores to the systems that are measured meanwhile."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.005)


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    system = Mpi(comm)
    while True:
        pending = json.loads(sys.stdin.readline() or "null") if comm.rank == 0 else None
        wait_quietly(comm)
        request = comm.bcast(pending)
        if request is None:
            return
        samples = measure(system, comm.rank, comm.size, *request)
        if comm.rank == 0:
            print(ANSWER + json.dumps(samples), flush=True)


if __name__ == "__main__":
    main()
