"""The ranks of vLLM's shared-memory collectives in C++, for `benchmarks.collectives` and
`benchmarks.tensor_dict`: VLLM_PYTHON -m benchmarks.collective_vllm N.

The first process passes requests on to N ranks, one JSON list a line, and prints ``samples [...]``.
vLLM's wheel for CPUs has these operations for x86-64 with AVX-512 or AVX2; its ranks spin while
they wait, and never yield. Its gather is left out: it waits for ever here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.child import ANSWER
from benchmarks.collective_ranks import measure
from benchmarks.rank_processes import RankProcesses, tie
from benchmarks.tensor_dict import tensors_only

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from torch import Tensor


class Vllm:
    """vLLM's operations on tensors."""

    def __init__(self, rank: int, n: int, path: str) -> None:
        with contextlib.suppress(ImportError):  # a library of operations, not a module of Python
            import vllm._C  # noqa: F401
        store = dist.FileStore(f"{path}-gloo", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        self._ops = torch.ops._C
        name = f"benchmark-{path.replace('/', '-')}"
        self._handle = self._share(f"{name}-all", rank, n)
        self._forth, self._back = (self._share(f"{name}-{way}", rank, n) for way in range(2))
        self._rank, self._n = rank, n
        self._meeting = torch.zeros(16)

    def _share(self, name: str, rank: int, n: int) -> int:
        """Shared memory of its own; its messages go one way, and not between collectives."""
        handle: int = self._ops.init_shm_manager(name, n, rank, torch.get_num_threads())
        dist.barrier()
        self._ops.join_shm_manager(handle, name)
        dist.barrier()
        # All have it open: its name need not outlive this process, however that ends.
        Path(f"/dev/shm/{name}_{rank}").unlink()
        return handle

    def bind(self, verb: str, x: Tensor) -> tuple[Callable[[], object], Tensor | None] | None:
        ops, handle = self._ops, self._handle
        whole = x.new_empty(self._n * x.numel())
        calls: dict[str, tuple[Callable[[], object], Tensor | None]] = {
            "all_reduce_": (lambda: ops.shm_allreduce(handle, x), x),
            "all_gather_": (lambda: ops.shm_all_gather(handle, x, whole), whole),
            "send/recv": (self._ping(x), None),
            "tensor dict": (self._pass_on(tensors_only()), None),
        }
        return calls.get(verb) or calls.get(f"{verb}_")

    def _ping(self, x: Tensor) -> Callable[[], object]:
        ops, rank = self._ops, self._rank

        def ping() -> None:
            if rank == 0:
                ops.shm_send_tensor_list(self._forth, [x], 1)
                ops.shm_recv_tensor_list(self._back, 1)
            elif rank == 1:
                ops.shm_recv_tensor_list(self._forth, 0)
                ops.shm_send_tensor_list(self._back, [x], 0)

        return ping

    def _pass_on(self, tensors: dict[str, Tensor]) -> Callable[[], object]:
        """Send a tensor dict in vLLM's form: its tensors, and one with pickled keys and sizes."""
        ops, rank = self._ops, self._rank

        def pass_on() -> None:
            if rank == 0:
                about = pickle.dumps([list(tensors), [x.size() for x in tensors.values()]])
                told = torch.frombuffer(bytearray(about), dtype=torch.uint8)
                ops.shm_send_tensor_list(self._forth, [*tensors.values(), told], 1)
            elif rank == 1:
                *received, told = ops.shm_recv_tensor_list(self._forth, 0)
                keys, sizes = pickle.loads(told.numpy().tobytes())
                got = [x.view(size) for size, x in zip(sizes, received, strict=True)]
                if keys != list(tensors) or len(got) != len(keys):
                    raise RuntimeError("the tensor dict is wrong")
            self.meet()

        return pass_on

    def meet(self) -> None:
        self._ops.shm_allreduce(self._handle, self._meeting)

    def agree(self, count: int) -> int:
        told = torch.tensor([count])
        dist.broadcast(told, 0)
        return int(told)


def serve(rank: int, n: int, path: str, requests: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    tie(rank, n)
    system = Vllm(rank, n, path)
    while (request := requests.recv()) is not None:
        requests.send(measure(system, rank, n, *request))


def main() -> None:
    n = int(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(n, serve, n, f"{folder}/s") as ranks,
    ):
        for line in sys.stdin:
            answer: Any = ranks.ask(*json.loads(line))
            print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
