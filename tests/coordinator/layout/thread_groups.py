"""Groups whose ranks are threads of this process: properties can be tried on many meshes."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coordinator import ReduceOp
from device_comm import reduce_in_rank_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMEOUT = 20.0


class _Hub:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


@dataclass
class ThreadGroup:
    """One rank's end of a group; as much of a GroupCoordinator as layouts use."""

    rank_in_group: int
    world_size: int
    hub: _Hub = field(repr=False)
    name: str = "threads"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def meet(self, value: Any) -> list[Any]:
        self.hub.slots[self.rank_in_group] = value
        self.hub.barrier.wait(_TIMEOUT)
        everyone = list(self.hub.slots)
        self.hub.barrier.wait(_TIMEOUT)
        return everyone

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = self.meet(x.detach().clone())
        assert len({part.shape for part in parts}) == 1
        return torch.cat(parts, dim)

    def all_gatherv(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        assert x.shape[dim] == sizes[self.rank_in_group]
        return torch.cat(self.meet(x.detach().clone()), dim)

    def all_reduce(self, x: Tensor, *, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        reduce_in_rank_order(self.meet(x.detach().clone()), op, result)
        return result

    def reduce_scatter(self, x: Tensor, dim: int, *, op: ReduceOp) -> Tensor:
        size = x.shape[dim] // self.world_size
        return self.reduce_scatterv(x, dim, [size] * self.world_size, op=op)

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], *, op: ReduceOp) -> Tensor:
        reduced = self.all_reduce(x, op=op)
        return torch.split(reduced, list(sizes), dim)[self.rank_in_group].clone()

    def all_to_all(
        self, x: Tensor, *, input_sizes: Sequence[int], output_sizes: Sequence[int]
    ) -> Tensor:
        everyone = self.meet([part.detach().clone() for part in torch.split(x, list(input_sizes))])
        mine = [parts[self.rank_in_group] for parts in everyone]
        assert [part.numel() for part in mine] == list(output_sizes)
        return torch.cat(mine)


def on_mesh(
    mesh: Sequence[int], body: Callable[[list[ThreadGroup], ThreadGroup], Any]
) -> list[Any]:
    """``body(axes, flat)`` on every rank of a mesh, row by row; the first error is raised."""
    size = math.prod(mesh)
    flat = _Hub(size)
    hubs: dict[tuple[int, tuple[int, ...]], _Hub] = {}
    ranks = []
    for rank in range(size):
        coordinates = [int(c) for c in torch.unravel_index(torch.tensor(rank), tuple(mesh))]
        axes = []
        for axis, n in enumerate(mesh):
            others = tuple(c for each, c in enumerate(coordinates) if each != axis)
            hub = hubs.setdefault((axis, others), _Hub(n))
            axes.append(ThreadGroup(coordinates[axis], n, hub))
        ranks.append((axes, ThreadGroup(rank, size, flat)))

    def run(each: tuple[list[ThreadGroup], ThreadGroup]) -> Any:
        try:
            return body(*each)
        except BaseException:
            for hub in (flat, *hubs.values()):
                hub.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, each) for each in ranks]
    errors = [error for error in (future.exception() for future in futures) if error]
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures]
