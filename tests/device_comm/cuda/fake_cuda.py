"""A CUDA driver that does nothing, under `CupyDriver`: what is left is what the host does."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager
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
from tests.device_comm.cuda.fake_library import compile_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shm_broadcast import Board

SOURCE = Path(__file__).with_name("fake_cuda.c")
STREAM = 0x4D0
CONTEXT = 0xC0


class FakeLaunch(ctypes.Structure):
    """What `fake_cuda.c` notes.

    ``fails`` is the CUresult that every call returns from now on; a launch waits while it is
    ``full``.
    """

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("fails", ctypes.c_uint32),
        ("full", ctypes.c_uint32),
        ("job", ctypes.c_char * abi.JOB_BYTES),
    )


def compile_fake(folder: Path) -> str:
    """The path of the library, made in ``folder``."""
    named = "-Wl,-soname,libcuda.so.1"
    return compile_library(SOURCE, folder / "libcuda.so.1", "-O2", named)


class PassedMark:
    """What no device has to reach."""

    def query(self) -> bool:
        return True

    def stream_wait(self) -> None:
        """Nothing to wait for."""


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
        return PassedMark()


@contextmanager
def stubbed(
    library: str,
) -> Iterator[tuple[StubbedDriver, FakeLaunch]]:
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
