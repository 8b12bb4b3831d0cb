"""`NcclBackend` on torch's own NCCL: as far as the devices allow."""

from __future__ import annotations

import time

import pytest
import torch

from device_comm import Communicator, Operation, ReduceOp
from device_comm.cuda.nccl.library import NcclError, NcclLibrary, NcclUnavailableError
from device_comm.cuda.nccl.nccl_backend import NcclBackend, NcclWindow
from shm_broadcast import Board, BoardHandle, Deadline, GroupAbortedError, GroupTimeoutError
from tests.device_comm.shm_ranks import share_through
from tests.device_comm.suite import check_table, run_whole_table
from tests.ranks import NEW_BOARD, run_ranks

pytestmark = pytest.mark.gpu


def make(rank: int, n: int, board: BoardHandle, path: str, timeout: float = 60.0) -> Communicator:
    watch = Board.attach(board, rank)
    share = share_through(path)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Communicator(
        NcclBackend.create(rank, n, share, device=device, name="tp", timeout=timeout, watch=watch)
    )


def alone(rank: int, n: int, board: BoardHandle, path: str) -> tuple[int, ...]:
    """A group of one does not get to NCCL by itself: its backend is called."""
    comm = make(rank, n, board, path)
    with comm:
        x = torch.arange(1000.0, device=comm.device)
        y = torch.zeros_like(x)
        start, wait = comm.backend.start, {"name": "tp", "timeout": 30.0}
        start(Operation("all_reduce", x, y, op=ReduceOp.SUM, **wait))
        comm.flush()
        assert torch.equal(x, y)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            start(Operation("all_reduce", x, y, op=ReduceOp.AVG, **wait))
            start(Operation("all_gather", x, y, **wait))
        for turn in range(100):
            x.fill_(turn)
            graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [99]
        del graph
    return NcclLibrary.of_torch().version


def test_a_group_of_one_and_a_graph(store_path: str) -> None:
    (version,) = run_ranks(1, alone, NEW_BOARD, store_path, timeout=120)
    assert tuple(version) >= (2, 14, 0)


def in_a_window(rank: int, n: int, board: BoardHandle, path: str) -> str:
    """Sums in a window, replayed among eager ones; or why there is none."""
    with make(rank, n, board, path) as comm:
        assert isinstance(comm.backend, NcclBackend)
        try:
            memory = NcclWindow.allocate(comm.backend, 1 << 20)
            window = NcclWindow(comm.backend, memory, Deadline.after(60.0))
        except NcclUnavailableError as error:
            return str(error)
        x = torch.ones(1000, dtype=torch.bfloat16, device=comm.device)
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        how = {"op": ReduceOp.SUM, "name": "tp", "timeout": 30.0}
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        window.start(Operation("all_reduce", x, y, **how))
        with torch.cuda.graph(graph, stream=stream):
            for source, output in ((x, y), (y, z), (z, y)):
                window.start(Operation("all_reduce", source, output, **how))
        wrong = torch.zeros((), device=comm.device)
        for turn in range(200):
            x.fill_(turn % 3)
            graph.replay()
            wrong += (y != turn % 3 * n**3).any()
            if turn % 10 == 0:
                window.start(Operation("all_reduce", x, z, **how))
                wrong += (z != turn % 3 * n).any()
        comm.flush()
        assert not wrong
        del graph
        return ""


@pytest.mark.parametrize(
    "n",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="for two devices")
        ),
    ],
)
def test_sums_in_a_window(n: int, store_path: str) -> None:
    told = run_ranks(n, in_a_window, NEW_BOARD, store_path, timeout=120)
    print(told)  # noqa: T201 - for the report
    assert len(set(told)) == 1


def aborted(rank: int, n: int, board: BoardHandle, path: str) -> float:
    comm = make(rank, n, board, path)
    x = torch.ones(1000, device=comm.device)
    comm.backend.start(Operation("all_reduce", x, x, timeout=30.0, name="tp all_reduce"))
    began = time.monotonic()
    comm.abort("enough")
    with pytest.raises(GroupAbortedError, match="enough"):
        comm.barrier() if n > 1 else comm.runner.skip("barrier", None, False)
    comm.close()
    torch.cuda.synchronize()
    assert float(torch.ones(5, device=comm.device).sum()) == 5
    return time.monotonic() - began


def test_abort(store_path: str) -> None:
    (seconds,) = run_ranks(1, aborted, NEW_BOARD, store_path, timeout=120)
    assert seconds < 20


def shared(rank: int, n: int, board: BoardHandle, path: str) -> str:
    try:
        comm = make(rank, n, board, path, timeout=25.0)
    except (NcclError, GroupTimeoutError, GroupAbortedError) as error:
        return f"{type(error).__name__}: {error}"
    with comm:
        total = comm.all_reduce(torch.ones(10, device=comm.device))
        comm.flush()
        return f"sums {total.unique().tolist()}"


def test_two_ranks_on_one_device_work_or_are_refused_in_time(store_path: str) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a device for each rank")
    told = run_ranks(2, shared, NEW_BOARD, store_path, timeout=120)
    print(told)  # noqa: T201 - for the report
    assert told == ["sums [2.0]"] * 2 or all("sums" not in each for each in told)


def table(rank: int, n: int, board: BoardHandle, path: str) -> dict[str, str]:
    with make(rank, n, board, path) as comm:
        return run_whole_table(comm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
def test_table(store_path: str) -> None:
    check_table(run_ranks(2, table, NEW_BOARD, store_path, timeout=240))
