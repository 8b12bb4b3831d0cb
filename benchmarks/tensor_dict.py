"""Tensor dicts between two ranks of one host: python -m benchmarks.tensor_dict [--quick].

Ours through shared memory and through torch's groups, beside gloo used the plain way: the metadata
as a pickled object, then one message for each tensor. vLLM's C++, which takes no numbers, is given
the tensors alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import coordinator
from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.peers import Peers
from benchmarks.rank_processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

SYSTEMS = ("ours", "ours over gloo", "gloo")
WORKS = ("broadcast", "send/recv")
REPEATS = 5


def tensors_only() -> dict[str, torch.Tensor]:
    """What a pipeline stage hands on: hidden states, residuals, positions."""
    return {
        "hidden_states": torch.full((256, 4096), 1.5, dtype=torch.bfloat16),
        "residual": torch.full((256, 4096), -2.0, dtype=torch.bfloat16),
        "positions": torch.arange(256),
    }


def payload() -> dict[str, Any]:
    """The same, and numbers."""
    return {**tensors_only(), **{f"number {index}": index for index in range(6)}}


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(got) == list(expected) and all(
        torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else True
        for key, value in got.items()
    )


def plain_send(values: dict[str, Any], put: Callable[[Any], None], tensor: Any) -> None:
    """Metadata, then tensors."""
    put(
        [
            (key, (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value)
            for key, value in values.items()
        ]
    )
    for value in values.values():
        if isinstance(value, torch.Tensor):
            tensor(value)


def plain_receive(get: Callable[[], Any], tensor: Any) -> dict[str, Any]:
    """The other end of `plain_send`."""
    values = {}
    for key, value in get():
        values[key] = torch.empty(value[1], dtype=value[0]) if isinstance(value, tuple) else value
        if isinstance(value, tuple):
            tensor(values[key])
    return values


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, path: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.rank = rank
        self.values = payload()
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{path}-gloo", 2), rank=rank, world_size=2
        )

        def groups(name: str, torch_only: bool) -> Any:
            store = dist.FileStore(f"{path}-{name}", 2)
            return coordinator.init(
                tp=2, rank=rank, world_size=2, store=store, backend="gloo", torch_only=torch_only
            ).tp

        self.groups = {
            "ours": groups("shm", torch_only=False),
            "ours over gloo": groups("torch", torch_only=True),
        }

    def once(self, system: str, work: str) -> dict[str, Any]:
        """Rank 0's values, on rank 1."""
        if system != "gloo":
            return self._ours(self.groups[system], work)
        if work == "broadcast":
            return self._plain(
                lambda metadata: dist.broadcast_object_list([metadata], 0),
                self._get_broadcast,
                partial(dist.broadcast, src=0),
                partial(dist.broadcast, src=0),
            )
        return self._plain(
            lambda metadata: dist.send_object_list([metadata], 1),
            self._get_sent,
            partial(dist.send, dst=1),
            partial(dist.recv, src=0),
        )

    def _ours(self, group: Any, work: str) -> dict[str, Any]:
        if work == "broadcast":
            return dict(group.broadcast_tensor_dict(self.values if self.rank == 0 else None, src=0))
        if self.rank == 0:
            group.send_tensor_dict(self.values, dst=1)
            return self.values
        return dict(group.recv_tensor_dict(src=0))

    def _plain(self, put: Any, get: Any, give: Any, take: Any) -> dict[str, Any]:
        if self.rank == 0:
            plain_send(self.values, put, give)
            return self.values
        return plain_receive(get, take)

    def _get_broadcast(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def _get_sent(self) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, 0)
        return box[0]

    def measure(self, system: str, work: str, count: int) -> list[float]:
        """Seconds from the start until the receiver has all, at the sender.

        The barriers are ours for every system: gloo's sleeps, and would start the ranks apart.
        """
        samples = []
        for _ in range(count):
            self.groups["ours"].barrier()
            started = time.perf_counter()
            got = self.once(system, work)
            self.groups["ours"].barrier()
            samples.append(time.perf_counter() - started)
        if not same(got, self.values):
            raise RuntimeError(f"{system} {work} is wrong")
        return samples


def serve(rank: int, path: str, requests: Connection) -> None:
    mine = Rank(rank, path)
    while (request := requests.recv()) is not None:
        requests.send(mine.measure(*request))


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(machine(), file=options.json)
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(2, serve, f"{folder}/s") as ranks,
        Peers(options.peers).collectives_of_vllm(2, report.left_out) as peers,
    ):
        count = 20 if options.quick else 100
        figures = []
        for work in [each for each in WORKS if options.only in each]:
            asks = {system: partial(ranks.ask, system, work, count) for system in SYSTEMS}
            if work == "send/recv":
                asks |= {
                    f"{name}, tensors only": partial(peer.ask, ("tensor dict", "fp32", 0, 0.2))
                    for name, peer in peers.items()
                }
            figures.append(Figure(f"tensor dict {work}", "4 MiB, 2 ranks", asks, repeats=REPEATS))
        report.measure(*figures)
    report.finish(options)


if __name__ == "__main__":
    main()
