"""`CupyDriver` over a fake driver, or without one: names it uses, launches, captures, events."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Operation
from device_comm.cuda import cupy_driver
from device_comm.cuda import driver as streams
from device_comm.cuda.driver import CudaEvent, DeviceError, Driver
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import KERNELS, MOVE_KERNEL, ErrorCode
from device_comm.cuda.ipc.setup import KernelWatchdog
from device_comm.operation import Norm
from device_comm.wrappers import CudaSideStream
from shm_broadcast import Board, CoordinatorError
from tests.device_comm.cuda.fakes import (
    COMPILER,
    CONTEXT,
    STREAM,
    FakeLaunch,
    StubbedDriver,
    compile_cuda,
    rank_0_of_2,
    stubbed,
)
from tests.device_comm.cuda.ipc_ranks import HostDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_comm import Communicator

    Over = tuple[StubbedDriver, FakeLaunch]

pytestmark = pytest.mark.quick

JOB = bytes(range(220)) * 2
CAPTURED, INVALIDATED = STREAM + 1, STREAM + 2
OTHER = 0xAA


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if COMPILER is None:
        pytest.skip("no C compiler to make a fake CUDA with")
    return compile_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def over(library: str) -> Iterator[Over]:
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


@pytest.mark.parametrize("stream", [STREAM, 0, (1 << 63) + 16])
def test_the_driver_gets_the_prepared_launch(over: Over, stream: int) -> None:
    driver, note = over
    launch = driver.prepare(MOVE_KERNEL, 7, 512, (JOB,))
    assert note.count == 0
    function = 0xF00 + KERNELS.index(MOVE_KERNEL)
    for times in (1, 2):
        launch(stream)
        assert seen(note) == (function, [7, 1, 1], [512, 1, 1], 0, stream, JOB)
        assert note.count == times


@pytest.mark.parametrize(
    ("result", "said"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (1234, "error 1234")]
)
def test_an_error_of_the_driver_is_raised(over: Over, library: str, result: int, said: str) -> None:
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


def test_a_launch_is_in_the_context_of_its_device(over: Over, library: str) -> None:
    """Whatever the thread's own is, that one is there afterwards."""
    driver, note = over
    launch, context = driver.prepare(MOVE_KERNEL, 1, 32, (JOB,)), Context(library)
    context.set(OTHER)
    launch(STREAM)
    driver.is_capturing(STREAM)
    assert (note.context, context.get()) == (CONTEXT, OTHER)
    after: list[int | None] = []
    thread = threading.Thread(target=lambda: (launch(STREAM), after.append(context.get())))
    thread.start()
    thread.join()
    assert (note.context, note.count, after) == (CONTEXT, 2, [None])
    context.set(0)
    with pytest.raises(DeviceError, match=r"^cuCtxGetCurrent: the device has no context$"):
        cupy_driver.driver_calls(ctypes.CDLL(library))


def test_other_threads_run_while_a_launch_waits_for_room(over: Over) -> None:
    driver, note = over
    note.full = 1
    threading.Timer(0.05, setattr, (note, "full", 0)).start()
    driver.prepare(MOVE_KERNEL, 1, 32, (JOB,))(STREAM)
    assert note.count == 1


def test_captures_are_seen_and_get_the_launches(over: Over) -> None:
    driver, note = over
    assert driver.is_capturing(CAPTURED) is True
    assert driver.is_capturing(STREAM) is False
    with pytest.raises(DeviceError, match=r"^cuStreamIsCapturing: error 901$"):
        driver.is_capturing(INVALIDATED)
    with Board.create(2, 0) as board, rank_0_of_2(driver, board) as comm:
        driver.stream = CAPTURED
        comm.all_reduce(torch.ones(4))
    assert (note.stream, note.count) == (CAPTURED, 1)


def test_arguments_live_as_long_as_the_launch(over: Over) -> None:
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


# --- eager calls -------------------------------------------------------------------------


@pytest.fixture
def comm(over: Over) -> Iterator[Communicator]:
    with Board.create(2, 0) as board, rank_0_of_2(over[0], board) as made:
        yield made


def test_repeated_calls_are_planned_once_and_read_one_word(
    comm: Communicator, over: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, note = over
    noted: list[str] = []
    prepare, failed = driver.prepare, vars(KernelWatchdog)["failed"].fget
    monkeypatch.setattr(
        driver, "prepare", lambda kernel, *rest: (noted.append(kernel), prepare(kernel, *rest))[1]
    )
    monkeypatch.setattr(
        KernelWatchdog, "failed", property(lambda health: (noted.append("read"), failed(health))[1])
    )
    x, weight = torch.ones(3, 8), torch.ones(8)
    norm = Norm(x, weight, torch.empty_like(x), 1e-6)
    operation = Operation("all_reduce", x, torch.empty_like(x), timeout=60.0, norm=norm)
    for _ in range(3):
        comm.backend.start(operation)
    assert (note.count, noted) == (3, ["ipc_packets_norm_float32", "read", "read", "read"])


def test_the_next_call_raises_the_error_of_a_kernel(comm: Communicator) -> None:
    backend: Any = comm.backend
    fields = (ErrorCode.TIMEOUT, 1, 0, 0, 5)
    abi._RECORD.pack_into(backend._health._control, abi.CONTROL_RECORD, *fields)
    with pytest.raises(CoordinatorError, match="waited for rank 1 to begin a collective"):
        backend.start(Operation("all_reduce", torch.ones(4), torch.ones(4), timeout=60.0))


# --- CuPy --------------------------------------------------------------------------------


def test_every_name_of_cupy_exists() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    tree = ast.parse(Path(cupy_driver.__file__).read_text())
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {name for name in names if re.fullmatch(r"cupy(\.\w+)+", name)}
    assert len(used) > 25
    for name in used | {"cupy.RawKernel.kernel", "cupy.cuda.function.Function.ptr"}:
        found = cupy
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


@pytest.mark.parametrize("kind", [cupy_driver.CupyDriver, HostDriver])
def test_it_has_all_methods_of_a_driver(kind: type) -> None:
    wanted = {name for name in vars(Driver) if not name.startswith("_")}
    assert wanted - set(dir(kind)) == {"device", "identity"}
    assert len(wanted) > 20
    for name in wanted - {"device", "identity"}:
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (kind, Driver))
        assert [*ours.parameters] == [*theirs.parameters], name


def test_without_cupy_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "_missing", "No module named 'cupy'")
    with pytest.raises(DeviceError, match="import cupy: No module named 'cupy'"):
        cupy_driver.CupyDriver(0)


@pytest.mark.parametrize("call", ["getDevice", "setDevice"])
def test_a_device_that_cannot_be_entered_is_an_error_of_the_device(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no other type: for `try_together` this rank has refused, and is not broken."""

    def fails(*_: int) -> None:
        raise RuntimeError("initialization error")

    runtime = SimpleNamespace(getDevice=lambda: 1, setDevice=lambda _: None)
    setattr(runtime, call, fails)
    monkeypatch.setattr(cupy_driver, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    driver = object.__new__(cupy_driver.CupyDriver)
    driver._index = 3
    with pytest.raises(DeviceError, match="cudaFree: initialization error"):
        driver.free(0x1000)


# --- torch's streams and events ----------------------------------------------------------

GLOBAL, RELAXED = 0, 2
"""Of CUstreamCaptureMode."""


def test_the_default_stream_is_marked_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.ExternalStream(0)`` is a new stream (pytorch issue 182960)."""
    recorded: list[object] = []

    def external(stream: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(stream=stream, device=device)

    monkeypatch.setattr(torch.cuda, "get_stream_from_external", external)
    monkeypatch.setattr(torch.cuda, "ExternalStream", None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    driver = object.__new__(cupy_driver.CupyDriver)
    driver.device = torch.device("cuda", 3)
    for stream in (0, 0x5000):
        driver.mark(stream)
    assert recorded == [external(0, driver.device), external(0x5000, driver.device)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "mark",
    [lambda stream: CudaEvent(stream).query, lambda stream: CudaSideStream(stream).mark()],
    ids=["mark", "side stream"],
)
def test_an_event_is_queried_in_a_mode_that_ends_no_capture(
    monkeypatch: pytest.MonkeyPatch, mark: Callable[[Any], Callable[[], bool]], fails: bool
) -> None:
    """And that of the thread is as before then, also when the device has failed."""
    thread, modes = ctypes.c_int(GLOBAL), []

    def exchange(mode: Any) -> int:
        mode._obj.value, thread.value = thread.value, mode._obj.value
        return 0

    def query() -> bool:
        modes.append(thread.value)
        if fails:
            raise RuntimeError("an illegal memory access was encountered")
        return True

    event = SimpleNamespace(record=lambda _: None, query=query)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    device = torch.device("cuda", 0)
    passed = mark(SimpleNamespace(cuda_stream=0, device=device, record_event=lambda: event))
    if fails:
        with pytest.raises(DeviceError, match="cudaEventQuery: an illegal memory access"):
            passed()
    else:
        assert passed()
    assert modes == [RELAXED]
    assert thread.value == GLOBAL


@pytest.mark.parametrize("reached", [False, True])
def test_a_stream_waits_only_for_unreached_events(
    monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """A stream that is captured cannot wait for anything else than its graph."""
    event = SimpleNamespace(record=lambda _: None, query=lambda: reached)
    waits: list[object] = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda _: 0)
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    current = SimpleNamespace(wait_event=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 0))
    CudaEvent(stream).stream_wait()
    assert waits == ([] if reached else [event])
