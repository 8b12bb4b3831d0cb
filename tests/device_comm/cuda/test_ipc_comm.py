"""`IpcBackend` on a device of host threads: the verbs, algorithms, norms, streams and threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from coordinator import compile_ops
from coordinator.messages.incoming import Communicators
from coordinator.messages.transport import Sender
from device_comm import Communicator, LoopbackBackend, ReduceOp
from device_comm.cuda.ipc.ipc_backend import (
    IpcBackend,
    SideStreams,
    StreamOrder,
    StreamPlace,
    ipc_algorithms,
)
from device_comm.measuring import measure_candidates
from device_comm.selection import Candidate, Measured, SelectingBackend, Selection, Table
from device_comm.verbs.collectives import Collectives
from shm_broadcast import Board, BoardHandle, Deadline
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.ipc_ranks import (
    HostDriver,
    ipc_of,
    local_swaps,
    make_ipc,
    on_threads,
    run_local,
    small_layout,
)
from tests.device_comm.shm_ranks import make_comm
from tests.device_comm.suite import check_table, run_whole_table
from tests.patience import PATIENCE_SECONDS
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

DTYPES = {2: [torch.float32, torch.float16, torch.bfloat16, torch.int64], 4: [torch.float32]}
"""Those with kernels, and one without."""


def table(rank: int, n: int, library: str, path: str, board: BoardHandle) -> dict[str, str]:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        failures = run_whole_table(comm, DTYPES[n])
    assert not driver.held
    return failures


@pytest.mark.parametrize("n", [2, 4])
def test_table(n: int, run_ipc: Callable[..., list[Any]]) -> None:
    check_table(run_ipc(n, table))


# --- algorithms --------------------------------------------------------------------------

KERNEL = "ipc_packets_norm_float32"
NAMES = ["ipc packets", "ipc one-shot", "ipc two-shot"]


def test_algorithms_are_measured_and_chosen(emulation_library: Path) -> None:
    assert run_local(emulation_library, 2, chosen) == [NAMES, NAMES]


def chosen(ipc: Communicator, driver: HostDriver) -> list[str]:
    rank = ipc.rank
    candidates = [*ipc_algorithms(ipc_of(ipc)), Candidate("ipc", ipc.backend)]
    assert [each.name for each in candidates[:3]] == NAMES
    limit = candidates[0].up_to
    assert limit == ipc_of(ipc).packet_bytes
    for each in candidates[:3]:
        assert each.backend is not None
        alone = Communicator(each.backend)
        for count in (1, 37, limit // 4):
            numbers = torch.arange(count, dtype=torch.float32)
            assert torch.equal(alone.all_reduce(numbers + rank), 2 * numbers + 1)
        with pytest.raises(NotImplementedError, match=r"no kernel for SUM of torch\.int64"):
            alone.all_reduce(torch.ones(2, dtype=torch.int64))
    sizes = {"all_reduce": (64, 2 * limit), "barrier": (0,)}
    found = measure_candidates(candidates, {}, ipc_of(ipc)._endpoint.swap, sizes).verbs
    assert list(found) == ["all_reduce"]
    measured = [sorted(row.seconds) for row in found["all_reduce"]]
    assert measured == [sorted([*NAMES, "ipc"]), sorted([*NAMES[1:], "ipc"])]
    rows = [
        Measured(size, {name: 1.0 + (name != best) for name in [*NAMES, "ipc"]})
        for size, best in zip((16, 256, 4096), NAMES, strict=True)
    ]
    selection = Selection(candidates, Table({}, {"all_reduce": rows}))
    comm = Communicator(SelectingBackend(selection))
    # The choice for the plain sum decides: here 256 bytes go in one shot.
    for count, is_one in ((4, True), (64, False)):
        x, launched = torch.full((1, count), rank + 1.0), driver.launched.count(KERNEL)
        normed, kept = comm.all_reduce_norm(x, torch.ones_like(x), torch.ones(count), 0.0)
        assert kept.unique().tolist() == [4.0]
        assert normed.unique().tolist() == [1.0]
        assert driver.launched.count(KERNEL) - launched == is_one, count
    used = []
    for count in (4, 64, 1024):
        x = torch.full((count,), rank + 1.0)
        used.append(selection.reducer("all_reduce", x.nbytes, ReduceOp.SUM, x.dtype).name)
        assert comm.all_reduce(x).unique().tolist() == [3.0]
    captured = driver.tensor((1024,), torch.float32)
    with comm.graph_capture(), driver.capture() as graph:
        total = comm.all_reduce(captured)
    captured.fill_(rank + 2)
    graph.replay()
    comm.flush()
    assert total.unique().tolist() == [5.0]
    assert ipc_of(ipc).reasons == ()
    return used


# --- all-reduce, residual and norm -------------------------------------------------------

ROWS, WIDTH = 5, 16


def rows_of(rank: int, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def in_double(n: int, epsilon: float, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """The norm and the new residual, by their definitions."""
    total = sum(rows_of(rank, width=width).double() for rank in range(n))
    kept = rows_of(100, width=width).double() + total
    mean = kept.square().mean(-1, keepdim=True)
    return kept / (mean + epsilon).sqrt() * rows_of(200, 1, width)[0].double(), kept


def check_norm(
    comm: Communicator,
    width: int = WIDTH,
    *,
    learns: bool = False,
    strided: bool = False,
    **how: Any,
) -> None:
    x, residual = rows_of(comm.rank, width=width), rows_of(100, width=width)
    weight = rows_of(200, 1, width)[0].requires_grad_(learns)
    if strided:
        residual = residual.t().contiguous().t()
    before = [each.clone() for each in (x, residual, weight)]
    found = comm.all_reduce_norm(x, residual, weight, 0.01, **how)
    for result, expected in zip(found, in_double(comm.world_size, 0.01, width), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, before, (x, residual, weight)))


def over_shm(rank: int, n: int, path: str, handle: BoardHandle) -> None:
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as comm:
        check_norm(comm)


def test_without_a_kernel_a_norm_runs_in_steps(store_path: str) -> None:
    run_ranks(3, over_shm, store_path, NEW_BOARD)
    check_norm(Communicator(LoopbackBackend("cpu")))


class Group(Collectives):
    """The verbs of a communicator, also as ops of compiled models."""

    def __init__(self, comm: Communicator) -> None:
        self.runner = comm.runner
        name = compile_ops.register_ops("tp", comm)
        self._traced = compile_ops.OpsOfGraph(name, comm.world_size)


def norms_over_ipc(
    rank: int, n: int, library: str, path: str, board: BoardHandle
) -> tuple[list[int], list[str]]:
    """How often each call launches the kernel; the ops of the compiled one."""
    driver = HostDriver(library)

    def launches(call: Callable[[], object]) -> int:
        before = driver.launched.count(KERNEL)
        call()
        return driver.launched.count(KERNEL) - before

    with make_ipc(rank, n, library, path, board, driver) as comm:
        counts = [
            launches(lambda: check_norm(comm)),
            launches(lambda: [check_norm(comm, timeout=15.0), check_norm(comm)]),
            # Ranks must launch the same, whatever the layout of one's tensors.
            launches(lambda: check_norm(comm, strided=rank == 1)),
            launches(lambda: check_norm(comm, width=64)),  # too large
            launches(lambda: check_norm(comm, width=7)),  # no whole cells
            launches(lambda: check_norm(comm, learns=True)),
        ]
        with torch.no_grad():
            counts.append(launches(lambda: check_norm(comm, learns=True)))
        x, residual, weight = rows_of(rank), rows_of(100), rows_of(200, 1)[0]
        with comm.graph_capture(), driver.capture() as graph:
            output, kept = comm.all_reduce_norm(x, residual, weight, 0.01)
        for turn in range(3):
            x.copy_(rows_of(rank) * (turn + 1))
            graph.replay()
            total = sum(rows_of(other) for other in range(n)) * (turn + 1)
            torch.testing.assert_close(kept, residual + total)
            expected = torch.nn.functional.rms_norm(kept, (WIDTH,), weight, 0.01)
            torch.testing.assert_close(output, expected)
        comm.flush()
        found, ops = compiled(Group(comm), rank)
        counts.append(launches(found))
    return counts, ops


def compiled(group: Group, rank: int) -> tuple[Callable[[], None], list[str]]:
    """What runs a compiled model and checks its results; the ops of its graph."""
    given = rows_of(rank), rows_of(100), torch.nn.Parameter(rows_of(200, 1)[0])
    ops: list[str] = []

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return group.all_reduce_norm(x.sigmoid(), residual, weight, 0.01)

    def backend(module: torch.fx.GraphModule, _: object) -> Any:
        names = (str(node.target) for node in module.graph.nodes)
        ops.extend(name for name in names if "group_coordinator" in name)
        return module

    fast = torch.compile(model, fullgraph=True, backend=backend)

    def run() -> None:
        with torch.no_grad():
            output, kept = fast(*given)
        total = sum(rows_of(other).sigmoid() for other in range(2))
        torch.testing.assert_close(kept, rows_of(100) + total)
        expected = torch.nn.functional.rms_norm(kept, (WIDTH,), given[2].detach(), 0.01)
        torch.testing.assert_close(output, expected)

    return run, ops


def test_norms_that_fit_run_in_one_kernel_also_compiled(run_ipc: Callable[..., list[Any]]) -> None:
    found = run_ipc(2, norms_over_ipc)
    op = "group_coordinator.all_reduce_norm.default"
    assert found == [([1, 2, 1, 0, 0, 0, 1, 1], [op])] * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"x": torch.ones(5, 16, dtype=torch.int64)}, TypeError, "x must be rows of floats"),
        ({"x": torch.tensor(1.0)}, TypeError, "x must be rows of floats, not 0 dimensions"),
        ({"residual": torch.ones(4, 16)}, ValueError, r"residual has shape \(4, 16\), not \(5, 16"),
        ({"residual": torch.ones(5, 16).half()}, TypeError, r"residual is torch.float16; x is"),
        ({"weight": torch.ones(5)}, ValueError, r"weight has shape \(5,\), not \(16,\)"),
        ({"weight": [1.0]}, TypeError, "weight must be a tensor"),
    ],
)
def test_norms_refuse_wrong_arguments(
    wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    right = {"x": torch.ones(5, 16), "residual": torch.ones(5, 16), "weight": torch.ones(16)}
    with pytest.raises(error, match=said):
        Communicator(LoopbackBackend("cpu")).all_reduce_norm(**(right | wrong))


# --- streams -----------------------------------------------------------------------------


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(None)


def test_calls_on_another_stream_wait_for_the_last_one(driver: HostDriver) -> None:
    order = StreamOrder(driver, "tp")
    assert len(order.marks()) == 1
    a, b = driver.make_stream(), driver.make_stream()
    for stream in (0, 0, a, b, b, 0):
        with driver.on(stream):
            assert order.look() == order.place() == StreamPlace(stream, False)
    assert driver.orders == [(0, a), (a, b), (b, 0)]
    assert order.marks()[0].query()
    with driver.on(a):
        assert len(order.marks()) == 2
    driver.free_stream(a)
    driver.free_stream(b)


def test_a_capture_has_one_stream(driver: HostDriver) -> None:
    order = StreamOrder(driver, "tp")
    order.place()
    driver.orders.clear()
    with driver.on(1), driver.capture():
        assert order.place() == order.place() == StreamPlace(1, True)
        with driver.on(2), driver.capture(), pytest.raises(ValueError, match="stream 0x1"):
            order.place()
    with driver.on(2), driver.capture():
        assert order.place() == StreamPlace(2, True)
        with driver.on(0):
            assert order.place() == StreamPlace(0, False)
    assert driver.orders == []
    order = StreamOrder(driver, "tp")
    with driver.on(1):
        order.place()
        with driver.capture(), driver.on(0), pytest.raises(ValueError, match="under way on"):
            order.place()
        with driver.capture():
            assert order.marks() == []


def test_messages_of_one_direction_share_a_stream(driver: HostDriver) -> None:
    sides = SideStreams(driver)
    first = sides.run(("send", 1), [], 0, "kept")
    second = sides.run(("send", 1), [], 0, None)
    other = sides.run(("recv", 1), [], 0, None)
    assert driver.held == 2
    ((_, one), (_, two), (_, three)) = driver.orders
    assert one == two != three
    for each in (first, second, other):
        driver.order(one, 0)
        driver.order(three, 0)
        assert each.ready()
    sides.close()
    assert driver.held == 0
    first.wait(None)


def test_a_message_does_not_wait_for_later_ones(driver: HostDriver) -> None:
    sides, late = SideStreams(driver), threading.Event()
    first = sides.run(("recv", 1), [], 0, None)
    second = sides.run(("recv", 1), [lambda side: driver.give(side, late.wait)], 0, None)
    too_long = threading.Timer(PATIENCE_SECONDS, late.set)
    too_long.start()
    first.wait(None)
    assert not late.is_set()
    too_long.cancel()
    late.set()
    second.wait(None)
    sides.close()


# --- threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False])
def test_ranks_may_be_threads(watched: bool, emulation_library: Path) -> None:
    n = 3

    def body(comm: Communicator, driver: HostDriver) -> None:
        rank = comm.rank
        assert not driver.mapped
        assert len(set(driver.reached)) == n - 1
        for numel in (3, 999, 20_000):
            x = torch.arange(numel, dtype=torch.float32) + rank
            assert torch.equal(comm.all_reduce(x), x * n + n * (n - 1 - 2 * rank) / 2)
        x = driver.tensor((5000,), torch.float32)
        with comm.graph_capture(), driver.capture() as graph:
            total = comm.all_reduce(x)
        for turn in range(3):
            x.fill_(rank + turn)
            graph.replay()
            assert total[-1] == n * turn + 3
        assert ipc_of(comm).reasons == ()

    with Board.create(n, None) as board:
        run_local(emulation_library, n, body, board if watched else None)


def test_nothing_is_made_on_the_device_once_a_peer_may_wait_there(emulation_library: Path) -> None:
    """All have come to the last swap but one: a quick rank has launched its probe."""
    n = 2
    swaps = local_swaps(n)

    def make(rank: int) -> list[str]:
        noted: list[str] = []

        def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: (noted.append(name), call(*given))[1]

        driver: Any = HostDriver(emulation_library)
        for name in ("allocate", "write", "make_stream"):
            setattr(driver, name, note(name, getattr(driver, name)))
        swap = note("swap", swaps[rank])
        options: Any = {"timeout": 10, "layout": small_layout(n), "limits": LIMITS}
        IpcBackend.create(driver, rank, n, swap, **options).close()
        return noted

    for noted in on_threads(n, make):
        assert noted[-2:] == ["swap", "swap"]
        assert "make_stream" in noted


def test_ranks_that_both_send_first_go_on(emulation_library: Path) -> None:
    """More than a channel holds; and both change what they have sent."""

    def body(comm: Communicator, _: HostDriver) -> None:
        other, size = 1 - comm.rank, 4 * small_layout(2).channel_bytes
        outgoing = Sender(Communicators(comm, comm), numbered=False)
        x, found = (torch.full((size,), comm.rank, dtype=torch.uint8) for _ in range(2))
        for _ in range(3):
            outgoing.send(None, (x,), other, Deadline.after(60))
        x.fill_(7)
        for _ in range(3):
            assert comm.recv(out=found, src=other).unique().tolist() == [other]
        outgoing.flush(Deadline.after(60))

    run_local(emulation_library, 2, body, timeout=60)
