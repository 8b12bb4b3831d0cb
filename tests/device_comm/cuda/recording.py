"""Launches of all ranks recorded, to be replayed by a program that was built with a sanitizer."""

from __future__ import annotations

import struct
import subprocess
from typing import TYPE_CHECKING

import torch

from tests.device_comm.cuda.emulated_world import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from device_comm.cuda.ipc.abi import KernelLaunch, RegionLayout
    from device_comm.cuda.ipc.planner import Planner

REPLAY_SECONDS = 120.0
_ROOM = 8 << 20


class Recording:
    """What all ranks launch, over memory that they share."""

    def __init__(self, layout: RegionLayout, *, timeout: float = 30.0) -> None:
        """Record for a group of its own."""
        self._memory = torch.zeros(_ROOM, dtype=torch.uint8)
        self._used = World.size(layout)
        self._world = World(layout, memory=self._memory[: self._used], timeout=timeout)
        self._streams: dict[object, list[KernelLaunch]] = {}
        self._addresses: list[int] = []
        self._expected: list[tuple[int, Tensor]] = []
        self.n = layout.world_size
        self.plans: list[Planner] = [self._world.planner(rank) for rank in range(self.n)]

    def put(self, tensor: Tensor) -> int:
        """Place a tensor in memory; its address."""
        begin = -(-self._used // 16) * 16
        self._used = begin + tensor.nbytes
        if self._used > _ROOM:
            raise MemoryError(f"a recording has room for {_ROOM} bytes")
        self._memory[begin : self._used] = tensor.reshape(-1).view(torch.uint8)
        return self._memory.data_ptr() + begin

    def table(self, sources: Sequence[int]) -> int:
        """Place a table of sources in memory; its address."""
        address = self.put(torch.tensor([*sources, *(0,) * (8 - len(sources))]))
        begin = address - self._memory.data_ptr()
        self._addresses += range(begin, begin + 8 * len(sources), 8)
        return address

    def launch(self, stream: object, launches: list[KernelLaunch]) -> None:
        """Append to a stream; each runs by itself."""
        self._streams.setdefault(stream, []).extend(launches)

    def expect(self, address: int, tensor: Tensor) -> None:
        """When all is done, this is to be at ``address``."""
        self._expected.append((address - self._memory.data_ptr(), tensor))

    def replay(self, program: Sequence[str], folder: Path) -> tuple[int, str, int]:
        """Run a program; its exit status, what it said, and how many results are wrong."""
        recording, result = folder / "recording", folder / "result"
        recording.write_bytes(self._packed())
        done = subprocess.run(
            [*program, str(recording), str(result)],
            capture_output=True,
            check=False,
            text=True,
            timeout=REPLAY_SECONDS,
        )
        wrong = len(self._expected)
        if result.exists():
            memory = torch.from_file(str(result), size=self._used_pages(), dtype=torch.uint8)
            wrong = sum(
                not torch.equal(memory[begin : begin + tensor.nbytes].view(tensor.dtype), tensor)
                for begin, tensor in self._expected
            )
        return done.returncode, done.stderr, wrong

    def _used_pages(self) -> int:
        return -(-self._used // 4096) * 4096

    def _packed(self) -> bytes:
        size = self._used_pages()
        header = (self._memory.data_ptr(), size, len(self._addresses), len(self._streams))
        parts = [struct.pack("<4Q", *header), self._memory[:size].numpy().tobytes()]
        parts.append(struct.pack(f"<{len(self._addresses)}Q", *self._addresses))
        for launches in self._streams.values():
            parts.append(struct.pack("<Q", len(launches)))
            parts += [
                struct.pack("<48sQQ", launch.kernel.encode(), launch.grid, launch.block)
                + launch.args[0]
                for launch in launches
            ]
        return b"".join(parts)
