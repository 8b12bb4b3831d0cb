"""Torch's symmetric memory on threads of the host: a switch that adds what lies in all ranks'.

It is as strict as the real one (torch's CUDASymmetricMemoryOps): whole 16 bytes at such addresses,
in memory that was shared, at the same place on all ranks. As there each rank adds one part, once
all have come, and nobody leaves before all parts are there.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from device_comm import Communicator
from device_comm.cuda import symmetric_backend
from device_comm.cuda.symmetric_backend import SymmetricBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

NAME = "the switch's group"
ALIGN = 16
GUARD = 0x5A
"""What lies behind each rank's memory."""


class Switch:
    """What ``n`` ranks share.

    Attributes:
        asked: offset and bytes of each sum, as each rank asked for it.
    """

    def __init__(self, n: int, limit: int) -> None:
        self.n = n
        self.asked: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self._all = [torch.full((limit + ALIGN,), GUARD, dtype=torch.uint8) for _ in range(n)]
        self.shared = [each[:limit] for each in self._all]
        self._meeting = threading.Barrier(n, timeout=20)

    def untouched(self) -> bool:
        """Whether nothing was written behind anybody's memory."""
        return all(bool((each[-ALIGN:] == GUARD).all()) for each in self._all)

    def add(self, x: Tensor, reduction: str, group: str) -> Tensor:
        """As `torch.ops.symm_mem.multimem_all_reduce_`."""
        assert (reduction, group) == ("sum", NAME)
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.is_contiguous()
        rank, offset = self._find(x)
        assert x.data_ptr() % ALIGN == 0
        assert x.nbytes % ALIGN == 0
        self.asked[rank].append((offset, x.nbytes))
        self._meeting.wait()
        assert len({asked[-1] for asked in self.asked}) == 1
        cells = x.nbytes // ALIGN
        mine = slice(cells * rank // self.n * ALIGN, cells * (rank + 1) // self.n * ALIGN)
        theirs = [
            each[offset : offset + x.nbytes][mine].view(x.dtype).float() for each in self.shared
        ]
        total = torch.stack(theirs).sum(0).to(x.dtype)
        for each in self.shared:
            each[offset : offset + x.nbytes][mine].view(x.dtype).copy_(total)
        self._meeting.wait()
        return x

    def _find(self, x: Tensor) -> tuple[int, int]:
        """The rank and the offset of a tensor."""
        for rank, shared in enumerate(self.shared):
            offset = x.data_ptr() - shared.data_ptr()
            if offset >= 0 and offset + x.nbytes <= shared.nbytes:
                return rank, offset
        raise AssertionError("this memory was not shared")


class LoneStream:
    """The one stream of the CPU."""

    address = 1

    def current(self) -> LoneStream:
        return self

    def capturing(self) -> bool:
        return False


@contextmanager
def switched(n: int, limit: int) -> Iterator[tuple[Switch, Callable[[int], Communicator]]]:
    """A switch, and what makes each rank's end of it; ranks are threads."""
    switch = Switch(n, limit)
    handle = SimpleNamespace(multicast_ptr=1)

    def make(rank: int) -> Communicator:
        group: Any = SimpleNamespace(group_name=NAME, rank=lambda: rank, size=lambda: n)
        return Communicator(SymmetricBackend(group, switch.shared[rank], name="tp", timeout=20.0))

    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        pytest.MonkeyPatch.context() as patch,
    ):
        library.impl("multimem_all_reduce_", switch.add, "CPU")
        patch.setattr(_symmetric_memory, "rendezvous", lambda *_: handle)
        patch.setattr(symmetric_backend, "CudaStreams", lambda _: LoneStream())
        yield switch, make
