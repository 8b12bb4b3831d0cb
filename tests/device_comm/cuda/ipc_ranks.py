"""Communicators over `IpcBackend`, and a `Driver` without a device for them.

`HostDriver` has kernels on host threads, memory in segments, streams as threads:

    driver = HostDriver(library)           # of the fixture `emulation_library`
    x = driver.tensor((1000,), torch.float32)       # can be shared; torch's own cannot
    with driver.capture() as graph:                 # launches are recorded, and done by
        ...
    graph.replay()

Stream 0 is the calling thread: what it is given is done on return, as torch's own work on the
CPU is. Others are threads that work off what they are given.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import queue
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from device_comm import Communicator
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.driver import DeviceError, Exported, HostBlock, NotShareableError
from device_comm.cuda.ipc import setup
from device_comm.cuda.ipc.abi import RegionLayout
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from shm_broadcast import Board
from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.segment import Segment, SegmentHandle
from tests.device_comm.cuda.emulator import LIMITS, Emulation
from tests.device_comm.shm_ranks import make_comm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from device_comm.cuda.driver import PreparedLaunch
    from device_comm.cuda.ipc.abi import Limits
    from shm_broadcast import BoardHandle

T = TypeVar("T")

_BEGIN = mmap.PAGESIZE
"""Where device memory begins in a segment."""


def small_layout(n: int) -> RegionLayout:
    """A region in which little data already goes in chunks."""
    return RegionLayout(n, staging_bytes=64 << 10, packet_bytes=1 << 10, channel_bytes=256 << 10)


class HostStream:
    """A thread that works off what it is given."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="host-stream", daemon=True)
        self._thread.start()

    def give(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class HostMark:
    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver
        self.event = threading.Event()

    def query(self) -> bool:
        return self.event.is_set()

    def stream_wait(self) -> None:
        self.hold(self._driver.current_stream())

    def hold(self, stream: int) -> None:
        """Have a stream wait for it."""
        self._driver.give(stream, self.event.wait)


class HostGraph:
    """Recorded launches."""

    def __init__(self, run: Callable[[str, int, int, bytes], None]) -> None:
        self._run = run
        self.launches: list[tuple[str, int, int, bytes]] = []

    def replay(self) -> None:
        for launch in self.launches:
            self._run(*launch)


class HostDriver:
    """Implements `device_comm.cuda.driver.Driver`.

    Attributes:
        pool_reason: why memory of torch's cannot be shared, as with expandable segments.
        lacks: "pin": the host has no memory to pin, "map": the device has no way to the others,
            "writes": this way loses what is written.
        launched: the names of all kernels, in order.
        reached: other devices that were asked for.
        orders: the streams that were ordered, before and after.
    """

    def __init__(self, library: Path | str | None, identity: str = "host") -> None:
        """Without a library, nothing can be launched."""
        self.device = torch.device("cpu")
        self.identity = identity
        self.pool_reason = ""
        self.lacks = ""
        self.launched: list[str] = []
        self.reached: list[str] = []
        self.orders: list[tuple[int, int]] = []
        self._emulation = None if library is None else Emulation(Path(library))
        self._allocations: dict[int, Segment] = {}
        self._numbers: dict[int, int] = {}
        self._counter = itertools.count(1)
        self._mapped: dict[int, tuple[Segment, memoryview]] = {}
        self._host: dict[int, Any] = {}
        self._streams: dict[int, HostStream] = {}
        self._current = 0
        self._capturing: dict[int, HostGraph] = {}

    @property
    def mapped(self) -> int:
        """How many allocations of other processes are mapped."""
        return len(self._mapped)

    @property
    def held(self) -> int:
        """How many things were not given back."""
        memory = len(self._allocations) + len(self._mapped) + len(self._host)
        return memory + len(self._streams)

    # --- for tests -----------------------------------------------------------------------

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory of this driver, until the driver goes."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.view(self.allocate(max(nbytes, 1)), shape, dtype)

    def view(self, pointer: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of an allocation as a tensor, which must go before it is freed."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        memory = self._allocations[pointer].memory[_BEGIN : _BEGIN + nbytes]
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    @contextmanager
    def on(self, stream: int) -> Iterator[int]:
        """Make a stream the current one."""
        before, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = before

    @contextmanager
    def capture(self) -> Iterator[HostGraph]:
        """Record what the current stream is given."""
        graph, stream = HostGraph(self._run), self._current
        self._capturing[stream] = graph
        try:
            yield graph
        finally:
            del self._capturing[stream]

    # --- memory --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        segment = Segment.create(_BEGIN + nbytes, "device-memory")
        pointer = _address(segment.memory)
        self._allocations[pointer] = segment
        self._numbers[pointer] = next(self._counter)
        return pointer

    def free(self, pointer: int) -> None:
        self._allocations.pop(pointer).close()

    def write(self, pointer: int, data: bytes) -> None:
        ctypes.memmove(pointer, data, len(data))

    def read(self, pointer: int, nbytes: int) -> bytes:
        return ctypes.string_at(pointer, nbytes)

    def why_not_shareable(self, pointer: int) -> str:
        return "" if self._find(pointer) else "not allocated by this driver"

    def why_pool_not_shareable(self) -> str:
        return self.pool_reason

    def allocation(self, pointer: int) -> int:
        base = self._find(pointer)
        return self._numbers[base] if base else 0

    def export(self, pointer: int) -> Exported:
        base = self._find(pointer)
        if not base:
            raise NotShareableError(pointer, self.why_not_shareable(pointer))
        handle = self._allocations[base].handle()
        return Exported(msgspec.msgpack.encode(handle), pointer - base, self.allocation(pointer))

    def map(self, handle: bytes) -> int:
        if self.lacks == "map":
            raise DeviceError("map", "no way to the peer's device")
        try:
            segment = Segment.attach(msgspec.msgpack.decode(handle, type=SegmentHandle))
        except SharedMemoryError as error:
            raise DeviceError("map", str(error)) from error
        memory = segment.memory
        if self.lacks == "writes":
            memory = memoryview(mmap.mmap(segment.handle().fd, segment.size, mmap.MAP_PRIVATE))
        base = _address(memory)
        self._mapped[base] = (segment, memory)
        return base

    def unmap(self, base: int) -> None:
        self._mapped.pop(base)[0].close()

    def reach(self, identity: str) -> None:
        self.reached.append(identity)

    def host_allocate(self, nbytes: int) -> HostBlock:
        if self.lacks == "pin":
            raise DeviceError("cudaHostAlloc", "no more memory to pin")
        buffer = ctypes.create_string_buffer(nbytes)
        pointer = ctypes.addressof(buffer)
        self._host[pointer] = buffer
        return HostBlock(memoryview(buffer).cast("B"), pointer)

    def host_free(self, block: HostBlock) -> None:
        del self._host[block.pointer]

    # --- kernels -------------------------------------------------------------------------

    def load(self, kernels: Iterable[str]) -> None:
        pass

    def prepare(self, kernel: str, grid: int, block: int, args: Sequence[bytes]) -> PreparedLaunch:
        (job,) = args

        def launch(stream: int) -> None:
            self.launched.append(kernel)
            if stream in self._capturing:
                self._capturing[stream].launches.append((kernel, grid, block, job))
            elif stream:
                self._streams[stream].give(lambda: self._run(kernel, grid, block, job))
            else:
                self._run(kernel, grid, block, job)

        return launch

    # --- streams -------------------------------------------------------------------------

    def current_stream(self) -> int:
        return self._current

    def is_capturing(self, stream: int) -> bool:
        return stream in self._capturing

    def make_stream(self) -> int:
        stream = HostStream()
        self._streams[id(stream)] = stream
        return id(stream)

    def free_stream(self, stream: int) -> None:
        self._streams.pop(stream).close()

    def order(self, before: int, after: int) -> None:
        self.orders.append((before, after))
        self.mark(before).hold(after)

    def mark(self, stream: int) -> HostMark:
        mark = HostMark(self)
        self.give(stream, mark.event.set)
        return mark

    def give(self, stream: int, task: Callable[[], object]) -> None:
        """Have a stream do something."""
        if stream:
            self._streams[stream].give(task)
        else:
            task()

    def _run(self, kernel: str, grid: int, block: int, job: bytes) -> None:
        if self._emulation is None:
            raise DeviceError(kernel, "there is no emulation")
        self._emulation.launch(kernel, grid, block, job)

    def _find(self, pointer: int) -> int:
        """The allocation that an address is in, or 0."""
        for base, segment in self._allocations.items():
            if base <= pointer < base + segment.size - _BEGIN:
                return base
        return 0


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + _BEGIN


# --- groups ------------------------------------------------------------------------------


def local_swaps(n: int, timeout: float = 20) -> list[Callable[[bytes], list[bytes]]]:
    """Swaps for ``n`` ranks that are threads of this process."""
    given: list[bytes] = [b""] * n
    meeting = threading.Barrier(n, timeout=timeout)

    def swap_of(rank: int) -> Callable[[bytes], list[bytes]]:
        def swap(payload: bytes) -> list[bytes]:
            given[rank] = payload
            meeting.wait()
            taken = list(given)
            meeting.wait()
            return taken

        return swap

    return [swap_of(rank) for rank in range(n)]


def on_threads(n: int, body: Callable[[int], T], timeout: float = 40) -> list[T]:
    """What ``body(rank)`` returns in ``n`` threads; raises what one of them raises."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(body, range(n), timeout=timeout))


def run_local(
    library: Path | str | None,
    n: int,
    body: Callable[[Communicator, HostDriver], T],
    board: Board | None = None,
    **how: Any,
) -> list[T]:
    """What ``body`` returns on ``n`` ranks that are threads, with devices of their own."""
    swaps = local_swaps(n)
    options: dict[str, Any] = {"timeout": 10, "layout": small_layout(n), "limits": LIMITS}

    def run(rank: int) -> T:
        driver = HostDriver(library, f"device {rank}")
        with ExitStack() as closing:
            watch = board and closing.enter_context(Board.attach(board.handle(), rank))
            given = options | {"watch": watch} | how
            backend = IpcBackend.create(driver, rank, n, swaps[rank], name="tp", **given)
            return body(closing.enter_context(Communicator(backend)), driver)

    return on_threads(n, run, 90)


def make_ipc(
    rank: int,
    n: int,
    library: str,
    path: str,
    board: BoardHandle | Board,
    driver: HostDriver | None = None,
    *,
    timeout: float = 20.0,
    limits: Limits = LIMITS,
    probe_seconds: float = 10.0,
) -> Communicator:
    """This rank's end of a group of all members of ``board``."""
    setup.ENDPOINT_LINGER = 30.0  # all memory is freed before the process ends
    mine = board if isinstance(board, Board) else Board.attach(board, rank)
    over = make_comm(rank, mine, path)
    return Communicator(
        IpcBackend.create(
            driver or HostDriver(library),
            rank,
            n,
            all_gather_bytes_over(over),
            name="tp",
            timeout=timeout,
            watch=mine,
            layout=small_layout(n),
            limits=limits,
            probe_seconds=probe_seconds,
        )
    )


def ipc_of(comm: Communicator) -> IpcBackend:
    """The backend of what `make_ipc` made."""
    assert isinstance(comm.backend, IpcBackend)
    return comm.backend


# --- on CUDA devices: ranks share those that there are -----------------------------------


def make_cuda(
    rank: int,
    n: int,
    swap: Callable[[bytes], list[bytes]],
    *,
    index: int | None = None,
    **options: Any,
) -> Communicator:
    """This rank's end of a group on CUDA devices; ``index``: on this one."""
    # CuPy may speak of the machine. Nothing is restored, for ranks may be threads.
    warnings.simplefilter("ignore")
    from device_comm.cuda.cupy_driver import CupyDriver

    device = rank % torch.cuda.device_count() if index is None else index
    torch.cuda.set_device(device)
    return Communicator(IpcBackend.create(CupyDriver(device), rank, n, swap, name="tp", **options))


@contextmanager
def cuda_comm(
    rank: int, n: int, path: str, handle: BoardHandle, **options: Any
) -> Iterator[Communicator]:
    """`make_cuda` among processes that share a board."""
    options = {"timeout": 60.0} | options
    with (
        Board.attach(handle, rank) as board,
        make_comm(rank, board, path, timeout=60.0) as over,
        make_cuda(rank, n, all_gather_bytes_over(over), watch=board, **options) as comm,
    ):
        yield comm
