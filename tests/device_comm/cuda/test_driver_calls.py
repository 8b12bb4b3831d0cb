"""What CUDA's driver is given for a launch, by the C extension and without it: over a fake one."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Operation
from device_comm.cuda import cupy_driver
from device_comm.cuda.driver import DeviceError
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import KERNELS, MOVE_KERNEL, ErrorCode
from device_comm.cuda.ipc.setup import KernelWatchdog
from device_comm.operation import Norm
from shm_broadcast import Board, CoordinatorError
from tests.device_comm.cuda.fake_cuda import (
    CONTEXT,
    STREAM,
    FakeLaunch,
    StubbedDriver,
    compile_fake,
    rank_0_of_2,
    stubbed,
)
from tests.device_comm.cuda.fake_library import COMPILER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from device_comm import Communicator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a fake CUDA with")

JOB = bytes(range(220)) * 2
CAPTURED, INVALIDATED = STREAM + 1, STREAM + 2
OTHER = 0xAA


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_fake(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def over(library: str) -> Iterator[tuple[StubbedDriver, FakeLaunch]]:
    with stubbed(library) as made:
        yield made


class Context:
    """The current one of the calling thread, in the fake."""

    def __init__(self, library: str) -> None:
        self._fake = ctypes.CDLL(library)

    def get(self) -> int | None:
        found = ctypes.c_void_p()
        self._fake.cuCtxGetCurrent(ctypes.byref(found))
        return found.value

    def set(self, context: int) -> None:
        self._fake.cuCtxSetCurrent(ctypes.c_void_p(context))


def seen(note: FakeLaunch) -> tuple[Any, ...]:
    """All that makes a launch."""
    job = bytes(note)[FakeLaunch.job.offset :][: abi.JOB_BYTES]
    return note.function, [*note.grid], [*note.block], note.shared_bytes, note.stream, job


WANTED = (0xF00 + KERNELS.index(MOVE_KERNEL), [7, 1, 1], [512, 1, 1], 0, STREAM, JOB)


@pytest.mark.parametrize("stream", [STREAM, 0, (1 << 63) + 16])
def test_the_driver_gets_what_was_prepared(
    over: tuple[StubbedDriver, FakeLaunch], stream: int
) -> None:
    driver, note = over
    launch = driver.prepare(MOVE_KERNEL, 7, 512, (JOB,))
    assert note.count == 0
    for times in (1, 2):
        launch(stream)
        assert (seen(note), note.count) == ((*WANTED[:4], stream, JOB), times)


@pytest.mark.parametrize(
    ("result", "said"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (1234, "error 1234")]
)
def test_what_the_driver_refuses_is_the_error_of_all_devices(
    over: tuple[StubbedDriver, FakeLaunch], library: str, result: int, said: str
) -> None:
    driver, note = over
    launch = driver.prepare(MOVE_KERNEL, 1, 32, (JOB,))
    note.fails = result
    Context(library).set(OTHER)
    with pytest.raises(DeviceError, match=f"^{MOVE_KERNEL}: {said}$"):
        launch(STREAM)
    with pytest.raises(DeviceError, match=f"^cuStreamIsCapturing: {said}$"):
        driver.is_capturing(STREAM)
    assert Context(library).get() == OTHER
    note.fails = 0
    launch(STREAM)
    assert note.count == 1


def test_a_launch_is_in_the_context_of_its_device(
    over: tuple[StubbedDriver, FakeLaunch], library: str
) -> None:
    """Whatever the thread's own is, that one is there afterwards."""
    driver, note = over
    launch, context = driver.prepare(MOVE_KERNEL, 1, 32, (JOB,)), Context(library)
    context.set(OTHER)
    launch(STREAM)
    driver.is_capturing(STREAM)
    assert (note.context, context.get()) == (CONTEXT, OTHER)
    after: list[int | None] = []

    def without_any() -> None:
        launch(STREAM)
        after.append(context.get())

    thread = threading.Thread(target=without_any)
    thread.start()
    thread.join()
    assert (note.context, note.count, after) == (CONTEXT, 2, [None])


def test_a_full_queue_does_not_keep_other_threads_from_emptying_it(
    over: tuple[StubbedDriver, FakeLaunch],
) -> None:
    driver, note = over
    note.full = 1
    threading.Timer(0.05, setattr, (note, "full", 0)).start()
    driver.prepare(MOVE_KERNEL, 1, 32, (JOB,))(STREAM)
    assert note.count == 1


def test_captures_are_seen(over: tuple[StubbedDriver, FakeLaunch]) -> None:
    driver, _ = over
    assert driver.is_capturing(CAPTURED) is True
    assert driver.is_capturing(STREAM) is False
    with pytest.raises(DeviceError, match=r"^cuStreamIsCapturing: error 901$"):
        driver.is_capturing(INVALIDATED)


def test_a_capture_is_given_the_launches_of_its_collectives(
    over: tuple[StubbedDriver, FakeLaunch],
) -> None:
    driver, note = over
    with Board.create(2, 0) as board, rank_0_of_2(driver, board) as comm:
        driver.stream = CAPTURED
        comm.all_reduce(torch.ones(4))
    assert (note.stream, note.count) == (CAPTURED, 1)


def test_without_a_context_there_are_no_calls(library: str) -> None:
    Context(library).set(0)
    with pytest.raises(DeviceError, match=r"^cuCtxGetCurrent: the device has no context$"):
        cupy_driver.driver_calls(ctypes.CDLL(library))


def test_arguments_are_given_back_with_the_launch(
    over: tuple[StubbedDriver, FakeLaunch],
) -> None:
    driver, _ = over
    job = bytes([1]) * abi.JOB_BYTES
    before = sys.getrefcount(job)
    launch = driver.prepare(MOVE_KERNEL, 1, 32, (job,))
    assert sys.getrefcount(job) == before + 1
    wrong: tuple[Any, ...] = ("0", -1.0, None)
    for stream in wrong:
        with pytest.raises(TypeError):
            launch(stream)
    del launch
    assert sys.getrefcount(job) == before


# --- what an eager call does besides -----------------------------------------------------


@pytest.fixture
def comm(over: tuple[StubbedDriver, FakeLaunch]) -> Iterator[Communicator]:
    with Board.create(2, 0) as board, rank_0_of_2(over[0], board) as made:
        yield made


def test_the_error_word_is_read_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[None] = []
    failed = vars(KernelWatchdog)["failed"].fget
    monkeypatch.setattr(
        KernelWatchdog, "failed", property(lambda health: (reads.append(None), failed(health))[1])
    )
    x = torch.ones(4)
    comm.all_reduce(x)
    assert len(reads) == 1
    comm.all_reduce_norm(torch.ones(1, 4), torch.ones(1, 4), x)
    assert len(reads) == 2


def test_what_a_kernel_has_recorded_is_raised_by_the_next_call(comm: Communicator) -> None:
    backend: Any = comm.backend
    record = abi._RECORD
    fields = (ErrorCode.TIMEOUT, 1, 0, 0, 5)
    record.pack_into(backend._health._control, abi.CONTROL_RECORD, *fields)
    with pytest.raises(CoordinatorError, match="waited for rank 1 to begin a collective"):
        backend.start(Operation("all_reduce", torch.ones(4), torch.ones(4), timeout=60.0))


def test_norms_that_come_again_are_planned_once(
    comm: Communicator, over: tuple[StubbedDriver, FakeLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, note = over
    planned: list[str] = []
    prepare = driver.prepare
    monkeypatch.setattr(
        driver, "prepare", lambda kernel, *rest: (planned.append(kernel), prepare(kernel, *rest))[1]
    )
    x, weight = torch.ones(3, 8), torch.ones(8)
    norm = Norm(x, weight, torch.empty_like(x), 1e-6)
    operation = Operation("all_reduce", x, torch.empty_like(x), timeout=60.0, norm=norm)
    for _ in range(8):
        comm.backend.start(operation)
    assert (note.count, planned) == (8, ["ipc_packets_norm_float32"])
