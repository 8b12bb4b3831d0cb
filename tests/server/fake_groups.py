"""Groups whose ranks are threads of this process: the arithmetic of a worker without processes."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60.0


class _Hub:
    """What the members of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor | None] = [None] * size
        self.links: list[queue.Queue[dict[str, Any]]] = [queue.Queue() for _ in range(size)]


class FakeGroup:
    def __init__(self, rank: int, size: int, hub: _Hub) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1
        self.all_reduces = 0
        self.device = torch.device("cpu")
        self._hub = hub

    def check(self) -> None:
        """Nothing has failed."""

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        self.all_reduces += 1
        self._hub.slots[self.rank_in_group] = x.clone()
        self._hub.barrier.wait(_TIMEOUT)
        parts = [part for part in self._hub.slots if part is not None]
        x.copy_(torch.stack(parts).sum(0))
        self._hub.barrier.wait(_TIMEOUT)
        return x

    def gather(self, x: torch.Tensor, dst: int = 0) -> torch.Tensor | None:
        self._hub.slots[self.rank_in_group] = x.clone()
        self._hub.barrier.wait(_TIMEOUT)
        parts = [part for part in self._hub.slots if part is not None]
        self._hub.barrier.wait(_TIMEOUT)
        return torch.cat(parts, dim=-1) if self.rank_in_group == dst else None

    def send_tensor_dict(self, message: dict[str, Any], **_options: Any) -> None:
        self._hub.links[self.rank_in_group + 1].put(message)

    def recv_tensor_dict(self, **_options: Any) -> dict[str, Any]:
        return self._hub.links[self.rank_in_group].get(timeout=_TIMEOUT)


@dataclass(frozen=True)
class FakeGroups:
    world: FakeGroup
    tp: FakeGroup
    pp: FakeGroup


@dataclass
class FakeContext:
    groups: FakeGroups
    device: torch.device
    report_progress: Callable[[int, int, str], None]


def alone() -> FakeGroups:
    """The groups of the only rank."""
    group = FakeGroup(0, 1, _Hub(1))
    return FakeGroups(group, group, group)


def run_threads(tp: int, pp: int, body: Callable[[Any], Any]) -> list[Any]:
    """``body(context)`` on tp * pp ranks; the results by rank. The first error is raised."""
    world = _Hub(tp * pp)
    stages = [_Hub(tp) for _ in range(pp)]
    columns = [_Hub(pp) for _ in range(tp)]

    def rank(number: int) -> Any:
        groups = FakeGroups(
            FakeGroup(number, tp * pp, world),
            FakeGroup(number % tp, tp, stages[number // tp]),
            FakeGroup(number // tp, pp, columns[number % tp]),
        )
        try:
            return body(FakeContext(groups, torch.device("cpu"), lambda *_: None))
        except BaseException:
            for hub in (world, *stages, *columns):
                hub.barrier.abort()
            raise

    with ThreadPoolExecutor(tp * pp) as threads:
        futures = [threads.submit(rank, number) for number in range(tp * pp)]
    errors = [future.exception() for future in futures]
    causes = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]
    return [future.result() for future in futures]
