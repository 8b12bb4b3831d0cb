"""The CUDA kernels on threads of the host: built with g++ from the same sources.

Device memory is any memory. A launch runs one host thread for each
thread of its grid and returns when all are done, so keep grids and blocks small: see `LIMITS`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import ErrorCode, Limits
from device_comm.cuda.ipc.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.ipc.abi import KernelLaunch

KERNELS = Path(__file__).parents[3] / "device_comm/cuda/kernels"
EMULATION = Path(__file__).parent / "emulation"

LIMITS = Limits(max_blocks=2, lanes=2, threads=16, packets_up_to=1 << 10, one_shot_up_to=4 << 10)
"""What a machine of few cores runs in good time."""

_FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing")
_COMPILE_SECONDS = 240.0


def cccl() -> Path | None:
    """The folder of libcu++'s headers: of the CUDA toolkit, or in CuPy's package."""
    found = [Path("/usr/local/cuda/include/cccl")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        found.append(Path(nvcc).resolve().parents[1] / "include/cccl")
    cupy = importlib.util.find_spec("cupy")
    if cupy is not None and cupy.submodule_search_locations:
        bundled = Path(cupy.submodule_search_locations[0]) / "_core/include/cupy/_cccl"
        found += sorted(bundled.glob("*"))
    return next((folder for folder in found if (folder / "cuda/atomic").exists()), None)


def why_not() -> str:
    """Why kernels cannot be built for the host; ``""`` if they can."""
    if shutil.which("g++") is None:
        return "no g++"
    return "" if cccl() is not None else "no headers of libcu++: neither nvcc's nor CuPy's"


def build(source: str, output: Path, flags: Sequence[str], kernels: Path = KERNELS) -> Path:
    """Compile a file of the folder ``emulation`` with the kernels in it; return ``output``."""
    command = ["g++", *_FLAGS, *flags, f"-I{EMULATION}", f"-I{kernels}", "-isystem", str(cccl())]
    command += [str(EMULATION / source), "-o", str(output), "-pthread"]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=_COMPILE_SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return output


class Emulation:
    """A device made of host threads. Any number of threads may launch at a time."""

    def __init__(self, library: Path) -> None:
        """Load the library of the fixture `emulation_library`."""
        self._emulate = ctypes.CDLL(str(library)).emulate
        number = ctypes.c_uint32
        self._emulate.argtypes = (ctypes.c_char_p, number, number, ctypes.c_char_p)

    def launch(self, kernel: str, grid: int, block: int, args: bytes) -> None:
        """Run a kernel, whose parameter is ``args``, and return when it is done."""
        if self._emulate(kernel.encode(), grid, block, args) != 0:
            raise ValueError(f"no kernel {kernel}")

    def run(self, launches: Sequence[KernelLaunch]) -> None:
        """Run what a planner has planned, one launch after the other."""
        for launch in launches:
            self.launch(launch.kernel, launch.grid, launch.block, launch.args[0])


NEAR_WRAP = 2**32 - 3
"""Epochs and counts of chunks begin here, so that 32 bits of them wrap around soon."""
SECONDS = 30.0


def small_layout(n: int, **changes: int) -> abi.RegionLayout:
    """Of 1 KiB stagings, so that little data goes in many chunks."""
    sizes = {"staging_bytes": 1024, "packet_bytes": 512, "channel_bytes": 256} | changes
    return abi.RegionLayout(n, **sizes)


class World:
    """The regions and control blocks of a group, in one piece of memory."""

    def __init__(
        self,
        layout: abi.RegionLayout,
        *,
        memory: Tensor | None = None,
        start: int = NEAR_WRAP,
        timeout: float = SECONDS,
        limits: Limits = LIMITS,
    ) -> None:
        """Take memory as it is before the first launch."""
        self.layout, self.limits, self.timeout = layout, limits, timeout
        size = self.size(layout)
        self._stride = size // layout.world_size
        self.memory = torch.zeros(size, dtype=torch.uint8) if memory is None else memory
        for rank in range(layout.world_size):
            region = self.region(rank)
            for word in (abi.REGION_EPOCH, abi.REGION_PACKET_EPOCH):
                region[word : word + 8].view(torch.int64).fill_(start)
            region[abi.REGION_CHANNELS : abi.REGION_STAGING].view(torch.int64).fill_(start)

    @staticmethod
    def size(layout: abi.RegionLayout) -> int:
        return -(-(layout.size + abi.CONTROL_BYTES) // 64) * 64 * layout.world_size

    def region(self, rank: int) -> Tensor:
        return self._piece(rank)[: self.layout.size]

    def control(self, rank: int) -> Tensor:
        return self._piece(rank)[-abi.CONTROL_BYTES :]

    def record(self, rank: int) -> abi.ErrorRecord:
        return abi.ErrorRecord.read(self.control(rank).numpy().tobytes())

    def epoch(self, rank: int, word: int = abi.REGION_EPOCH) -> int:
        return int(self.region(rank)[word : word + 8].view(torch.int64))

    def has_come(self, rank: int, blocks: int, at: int) -> bool:
        """Whether all blocks of ``rank`` are at the start of the kernel that ``at`` begins next."""
        region, number = self.region(at), 2 * (self.epoch(at) + 1)
        flags = [abi.REGION_FLAGS + (block * abi.MAX_RANKS + rank) * 8 for block in range(blocks)]
        return all(int(region[flag : flag + 8].view(torch.int64)) >= number for flag in flags)

    def packets(self, at: int, source: int, epoch: int) -> Tensor:
        """What ``source`` sends to ``at`` in an epoch: words, by half, cell, and place in it."""
        size = 2 * self.layout.packet_bytes
        begin = self.layout.packets + (epoch % 2 * self.layout.world_size + source) * size
        return self.region(at)[begin : begin + size].view(torch.int64).view(2, -1, 2)

    def planner(self, rank: int) -> Planner:
        regions = tuple(self.region(r).data_ptr() for r in range(self.layout.world_size))
        group = abi.Group(
            regions, self.control(rank).data_ptr(), rank, self.layout, int(self.timeout * 1e9)
        )
        return Planner(group, self.limits)

    def _piece(self, rank: int) -> Tensor:
        return self.memory[rank * self._stride : (rank + 1) * self._stride]


class Rank:
    """One emulated rank. ``plan`` makes launches."""

    def __init__(self, world: World, rank: int, emulation: Emulation) -> None:
        self.world, self.rank, self.n = world, rank, world.layout.world_size
        self.plan = world.planner(rank)
        self._emulation = emulation

    def attempt(self, launches: list[KernelLaunch]) -> None:
        self._emulation.run(launches)

    def run(self, launches: list[KernelLaunch]) -> None:
        """Run launches and require that nothing went wrong."""
        self.attempt(launches)
        record = self.world.record(self.rank)
        assert record.code is ErrorCode.NONE, f"rank {self.rank}: {record}"

    def all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp = ReduceOp.SUM, **how: Any
    ) -> None:
        pointers = output.data_ptr(), source.data_ptr()
        self.run(self.plan.all_reduce(*pointers, source.nbytes, source.dtype, op, **how))

    def broadcast(self, buffer: Tensor, root: int) -> None:
        self.run(self.plan.broadcast(buffer.data_ptr(), buffer.nbytes, root))

    def all_gather(self, output: Tensor, source: Tensor, sizes: Sequence[int], **how: Any) -> None:
        self.run(self.plan.all_gather(output.data_ptr(), source.data_ptr(), sizes, **how))

    def all_to_all(
        self, output: Tensor, source: Tensor, gets: Sequence[int], gives: Sequence[int]
    ) -> None:
        self.run(self.plan.all_to_all(output.data_ptr(), source.data_ptr(), gets, gives))

    def send(self, source: Tensor, peer: int) -> None:
        self.run(self.plan.send(source.data_ptr(), source.nbytes, peer))

    def recv(self, output: Tensor, peer: int) -> None:
        self.run(self.plan.recv(output.data_ptr(), output.nbytes, peer))

    def shift(self, source: Tensor, after: int, output: Tensor, before: int) -> None:
        """Send to a rank while receiving from another."""
        with ThreadPoolExecutor(1) as beside:
            sent = beside.submit(self.send, source, after)
            self.recv(output, before)
            sent.result()


def run_threads(
    world: World, emulation: Emulation, body: Callable[..., Any], *args: Any
) -> list[Any]:
    """Run ``body(rank, *args)`` for all ranks at once, each in a thread; the results by rank.

    Nothing may be written beside tensors of `at`.
    """
    n = world.layout.world_size
    start = threading.Barrier(n)

    def run(rank: int) -> Any:
        start.wait(SECONDS)
        return body(Rank(world, rank, emulation), *args)

    _guarded.clear()
    with ThreadPoolExecutor(n) as pool:
        results = list(pool.map(run, range(n)))
    for room, begin, end in _guarded:
        assert bool((room[:begin] == _FILL).all()), "something was written before a tensor"
        assert bool((room[end:] == _FILL).all()), "something was written behind a tensor"
    return results


_EDGE = 128
"""Bytes beside a tensor, more than a slot."""
_FILL = 0x5A
_guarded: list[tuple[Tensor, int, int]] = []


def at(tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy whose address is ``shift`` bytes from a multiple of 16; see `run_threads`."""
    room = torch.full((tensor.nbytes + 2 * _EDGE + shift,), _FILL, dtype=torch.uint8)
    begin = _EDGE - room.data_ptr() % 16 + shift
    end = begin + tensor.nbytes
    _guarded.append((room, begin, end))
    return room[begin:end].view(tensor.dtype).copy_(tensor.flatten()).view(tensor.shape)


def wild(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order, with what is no number among them."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    numbers[rank::37] = (float("nan"), float("inf"), -0.0, 6e-8)[rank % 4]
    return numbers.to(dtype)


def in_rank_order(parts: list[Tensor], op: ReduceOp) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        if op is ReduceOp.PRODUCT:
            total = total * part.float()
        elif op is ReduceOp.MIN:
            total = torch.minimum(total, part.float())
        elif op is ReduceOp.MAX:
            total = torch.maximum(total, part.float())
        else:
            total = total + part.float()
    return (total / len(parts) if op is ReduceOp.AVG else total).to(parts[0].dtype)


def same_numbers(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def moved(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers in no order: a piece that comes to a wrong place does not fit there."""
    # of a seed torch takes the low 32 bits
    drawn = torch.Generator().manual_seed(rank << 24 ^ count)
    numbers = torch.randint(127, (count,), generator=drawn)
    return numbers % 2 == 1 if dtype is torch.bool else numbers.to(dtype)
