"""Libraries that stand in for CUDA's driver and for NCCL, and communicators over them.

The driver does nothing, under `CupyDriver`: what is left is what the host does. The fake NCCL has
one stream, and CPU tensors.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Communicator, Identity
from device_comm.cuda import cupy_driver
from device_comm.cuda.cupy_driver import CupyDriver
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import KERNELS, Limits
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from device_comm.cuda.ipc.mappings import Mappings
from device_comm.cuda.ipc.setup import Endpoint, KernelWatchdog
from device_comm.cuda.nccl import core as nccl_core
from device_comm.cuda.nccl.library import NcclLibrary
from device_comm.cuda.nccl.nccl_backend import NcclBackend
from shm_broadcast import Board, BoardHandle
from tests.device_comm.shm_ranks import share_through

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

COMPILER = shutil.which("gcc") or shutil.which("cc")


def compile_library(source: Path, library: Path, *options: str) -> str:
    """The path of ``library``, made of one file."""
    assert COMPILER is not None
    flags = [*options, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", library, source], check=True, timeout=60)
    return str(library)


def compile_cuda(folder: Path) -> str:
    """The path of the fake driver, made in ``folder``."""
    source = Path(__file__).with_name("fake_cuda.c")
    return compile_library(source, folder / "libcuda.so.1", "-O2", "-Wl,-soname,libcuda.so.1")


def compile_nccl(folder: Path, *options: str) -> str:
    """The path of the fake NCCL, made in ``folder``; ``-DBEFORE_WINDOWS``: one that has none."""
    source = Path(__file__).with_name("fake_nccl.c")
    return compile_library(source, folder / "libnccl.so.2", "-O1", "-pthread", *options)


# --- CUDA's driver -----------------------------------------------------------------------

STREAM = 0x4D0
CONTEXT = 0xC0


class FakeLaunch(ctypes.Structure):
    """What `fake_cuda.c` notes.

    ``fails`` is the CUresult that every call returns from now on; a launch waits while it is
    ``full``.
    """

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("function", "stream", "context", "count")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("shared_bytes", "fails", "full")),
        ("job", ctypes.c_char * abi.JOB_BYTES),
    )


class StubbedDriver(CupyDriver):
    """`CupyDriver` on tensors of the CPU. Torch's own part of streams and events is not there."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.device = torch.device("cpu")
        self.stream = STREAM
        self.load(KERNELS)

    def load(self, kernels: Iterable[str]) -> None:
        self._functions.update({kernel: 0xF00 + at for at, kernel in enumerate(kernels)})

    def current_stream(self) -> int:
        return self.stream

    def order(self, before: int, after: int) -> None:
        """Nothing runs."""

    def mark(self, stream: int) -> Any:  # noqa: ARG002 - nothing runs
        return SimpleNamespace(query=lambda: True, stream_wait=lambda: None)


@contextmanager
def stubbed(library: str) -> Iterator[tuple[StubbedDriver, FakeLaunch]]:
    """A driver over ``library``, and its notes of launches."""
    fake = ctypes.CDLL(library)
    note = FakeLaunch.in_dll(fake, "fake_launch")
    ctypes.memset(ctypes.byref(note), 0, ctypes.sizeof(note))
    fake.cuCtxSetCurrent(ctypes.c_void_p(CONTEXT))
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        deviceGetPCIBusId=lambda _: "stub",
        streamNonBlocking=1,
        streamCreateWithFlags=lambda _: STREAM + 16,
        streamDestroy=lambda _: None,
    )
    cuda = SimpleNamespace(runtime=runtime)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy_driver, "_missing", "")
        patch.setattr(cupy_driver, "cupy", SimpleNamespace(cuda=cuda), raising=False)
        patch.setattr(cupy_driver, "LIBCUDA", library)
        driver = StubbedDriver()
        yield driver, note
        driver.close()
        fake.cuCtxSetCurrent(None)


@contextmanager
def rank_0_of_2(driver: CupyDriver, board: Board) -> Iterator[Communicator]:
    """A group whose kernels nobody runs."""
    identity = Identity.of(0, 2, driver.device, name="tp", watch=board)
    health = KernelWatchdog(memoryview(bytearray(abi.CONTROL_BYTES)), identity)
    group = abi.Group((4096, 8192), 12288, 0, abi.RegionLayout(2), 10**9)
    closing = ExitStack()
    closing.callback(health.close)
    limits, mappings = Limits.for_ranks(2), Mappings(driver)
    endpoint = Endpoint(driver, group, limits, mappings, health, lambda mine: [mine, mine], closing)
    with Communicator(IpcBackend(identity, endpoint)) as comm:
        yield comm


# --- NCCL --------------------------------------------------------------------------------


class HostMark:
    """How much the stream had been given."""

    def __init__(self, fake: ctypes.CDLL) -> None:
        self._fake = fake
        fake.fakeMark.restype = ctypes.c_uint64
        self._at = fake.fakeMark()

    def query(self) -> bool:
        return bool(self._fake.fakePassed(ctypes.c_uint64(self._at)))

    def stream_wait(self) -> None:
        """There is one stream."""


class HostStreams:
    """The fake's stream. With ``patient``, a mark returns once all before it is done, so that
    what torch does on the CPU afterwards is in stream order."""

    address = 42  # the fake insists on it

    def __init__(self, library: str, patient: bool) -> None:
        self.fake = ctypes.CDLL(library)
        self.patient = patient
        self.mark_type = HostMark
        self.captures = False

    def current(self) -> HostStreams:
        return self

    def capturing(self) -> bool:
        return self.captures

    def mark(self) -> HostMark:
        mark = self.mark_type(self.fake)
        if self.patient:
            self.synchronize(mark)
        return mark

    def synchronize(self, mark: HostMark | None = None, seconds: float = 20.0) -> None:
        """What a user calls, who knows nothing of groups."""
        mark = mark or HostMark(self.fake)
        end = time.monotonic() + seconds
        while not mark.query():
            assert time.monotonic() < end, "the stream hangs"
            time.sleep(0.0002)

    def device(self) -> AbstractContextManager[object]:
        return nullcontext()


def make_nccl(
    rank: int,
    n: int,
    board: BoardHandle | Board | None,
    library: str,
    path: str,
    *,
    patient: bool = True,
    hold: float = 5.0,
    **options: Any,
) -> tuple[Communicator, HostStreams]:
    """This rank's end of a group, and its stream.

    ``hold``: seconds that messages are held back; so many that ranks which are stalled between a
    send and a receive still issue them together.
    """
    pytest.MonkeyPatch().setattr(nccl_core, "HOLD_SECONDS", hold)
    streams = HostStreams(library, patient)
    watch = Board.attach(board, rank) if isinstance(board, BoardHandle) else board
    backend = NcclBackend.create(
        rank,
        n,
        share_through(path),
        device="cpu",
        name="tp",
        timeout=20.0,
        watch=watch,
        library=NcclLibrary(library),
        streams=streams,
        **options,
    )
    return Communicator(backend), streams


def nccl_of(comm: Communicator) -> NcclBackend:
    """The backend of what `make_nccl` made."""
    assert isinstance(comm.backend, NcclBackend)
    return comm.backend
