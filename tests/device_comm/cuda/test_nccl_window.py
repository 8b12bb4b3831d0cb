"""`NcclWindow` over the fake NCCL, which knows what memory has a window: real processes."""

from __future__ import annotations

import ctypes
import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from coordinator.cuda_candidates import try_together
from device_comm import Communicator, Operation, ReduceOp
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.nccl import core as nccl_core
from device_comm.cuda.nccl.library import NcclLibrary, NcclResult, NcclUnavailableError
from device_comm.cuda.nccl.nccl_backend import NcclWindow
from device_comm.selection import Candidate, SelectingBackend, Selection
from shm_broadcast import Board, BoardHandle, CoordinatorError, Deadline, GroupAbortedError
from tests.device_comm.cuda.fake_library import COMPILER
from tests.device_comm.cuda.fake_nccl import compile_fake, make_nccl, nccl_of
from tests.device_comm.meeting import meet, wait_for_abort
from tests.device_comm.shm_ranks import make_comm
from tests.patience import STALL_SECONDS
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from device_comm.cuda.nccl.core import NcclMemory
    from device_comm.cuda.nccl.nccl_backend import NcclBackend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a fake NCCL with")

LIMIT = 8192
TYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_fake(tmp_path_factory.mktemp("nccl"))


def host_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def make(nccl: NcclBackend, memory: NcclMemory, seconds: float = 20.0) -> NcclWindow:
    return NcclWindow(nccl, memory, Deadline.after(seconds), host_bytes)


def reduced(rank: int, n: int, board: BoardHandle, library: str, path: str) -> tuple[int, int]:
    """How many operations were in windows, and how many memories are left."""
    comm, streams = make_nccl(rank, n, board, library, path)
    with comm:
        window = make(nccl_of(comm), NcclWindow.allocate(nccl_of(comm), LIMIT))
        through = Communicator(window)
        for dtype in TYPES:
            for count in (1, 7, 1000, LIMIT // dtype.itemsize):
                mine = torch.full((count,), rank + 1.0, dtype=dtype)
                total = torch.full_like(mine, n * (n + 1) / 2)
                assert torch.equal(through.all_reduce(mine), total)
                assert torch.equal(mine, torch.full_like(mine, rank + 1))
                assert through.all_reduce_(mine) is mine
                assert torch.equal(mine, total)
                later = through.all_reduce(mine, async_op=True)
                assert torch.equal(later.wait(), total * n)
        counted = streams.fake.fakeInWindows()
        for wrong in (torch.ones(LIMIT // 4 + 1), torch.ones(3, dtype=torch.float64)):
            with pytest.raises(NotImplementedError, match=f"no SUM of {wrong.nbytes} bytes"):
                window.start(operation(wrong))
        with pytest.raises(NotImplementedError, match="no MAX of"):
            window.start(operation(torch.ones(3), ReduceOp.MAX))
        assert float(comm.all_reduce(torch.ones(1))) == n  # beside it
        through.close()
        assert streams.fake.fakeMemories() == 1  # it is the communicator's
    return counted, streams.fake.fakeMemories()


def operation(x: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation:
    return Operation("all_reduce", x, x.clone(), op=op, timeout=20.0, name="tp all_reduce")


@pytest.mark.parametrize("n", [2, 3])
def test_sums_are_made_in_the_window(n: int, library: str, store_path: str) -> None:
    found = run_ranks(n, reduced, NEW_BOARD, library, store_path)
    assert found == [(len(TYPES) * 4 * 3, 0)] * n


# --- as a candidate ----------------------------------------------------------------------


def offered(
    rank: int, n: int, board: BoardHandle, library: str, path: str, how: str
) -> tuple[str, str, int]:
    """Why it is refused; what is chosen for a large sum; the memories that are left."""
    with Board.attach(board, rank) as mine, ExitStack() as closing:
        over = closing.enter_context(make_comm(rank, mine, f"{path}-over"))
        comm, streams = make_nccl(rank, n, mine, library, path)
        closing.enter_context(comm)
        nccl = nccl_of(comm)
        streams.fake.fakeNoWindows(how == "none") if how != "old" else None

        def prepare() -> NcclMemory:
            # More than there is, where it is to fail.
            return NcclWindow.allocate(nccl, 1 << 60 if (how, rank) == ("full", 1) else LIMIT)

        made = try_together(
            "nccl window",
            prepare,
            lambda memory: make(nccl, memory),
            all_gather_bytes_over(over),
            closing,
        )
        limit = made.backend.limit if isinstance(made.backend, NcclWindow) else None
        window = Candidate(made.name, made.backend, made.unavailable, limit)
        chosen = SelectingBackend(Selection([window, Candidate("nccl", nccl)]))
        total = Communicator(chosen).all_reduce(torch.ones(100))
        assert total.unique().tolist() == [n]
        left = 0 if how == "old" else streams.fake.fakeMemories()
        refused = dict(chosen.explain().unavailable).get("nccl window", "")
        small, large = (chosen.explain().backend("all_reduce", size) for size in (1, LIMIT + 1))
        assert small == ("nccl" if refused else "nccl window")
        return refused, large, left


@pytest.mark.parametrize(
    ("how", "refused", "left"),
    [
        ("", "", 1),
        ("old", "rank 0: NCCL 2.26.5 has no windows; 2.27 has", 0),
        ("none", "rank 0: NCCL makes no window of these devices' memory", 0),
        ("full", "rank 1: ncclMemAlloc: INVALID_ARGUMENT: fake error", 0),
    ],
)
def test_it_is_offered_on_all_ranks_or_on_none(
    how: str, refused: str, left: int, library: str, store_path: str, tmp_path: Path
) -> None:
    if how == "old":
        library = compile_fake(tmp_path, "-DBEFORE_WINDOWS")
    found = run_ranks(2, offered, NEW_BOARD, library, store_path, how)
    assert found == [(refused, "nccl", left)] * 2


# --- ends --------------------------------------------------------------------------------


def absent(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    with Board.attach(board, rank) as mine:
        comm, _ = make_nccl(rank, n, mine, library, path)
        memory = NcclWindow.allocate(nccl_of(comm), LIMIT)
        meet(rank, n, path)
        if rank == 1:
            mine.record_begin("thinking")
            wait_for_abort(mine)
            return ""
        with pytest.raises(CoordinatorError) as info:
            make(nccl_of(comm), memory, 0.5)
        return str(info.value)


def test_a_rank_that_does_not_come_to_the_window_is_named(library: str, store_path: str) -> None:
    text = run_ranks(2, absent, NEW_BOARD, library, store_path)[0]
    assert "tp nccl window: timed out after 0.5 s, waiting for rank 1" in text
    assert "last seen in thinking" in text


def aborted(rank: int, n: int, board: BoardHandle, library: str, path: str, hangs: bool) -> int:
    """How many memories are left. ``hangs``: as if the device were not done by then."""
    with Board.attach(board, rank) as mine:
        comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
        window = make(nccl_of(comm), NcclWindow.allocate(nccl_of(comm), LIMIT))
        meet(rank, n, path)
        if rank == 1:
            comm.abort("enough")
        else:
            wait_for_abort(mine)
        with pytest.raises(GroupAbortedError, match="enough"):
            Communicator(window).all_reduce(torch.ones(3))
        if hangs:
            pytest.MonkeyPatch().setattr(nccl_of(comm), "_passed", lambda: False)
        comm.close()
        del window
        gc.collect()
        return int(streams.fake.fakeMemories())


@pytest.mark.parametrize("hangs", [False, True])
def test_an_abort_leaves_no_memory_behind_but_what_the_device_may_use(
    hangs: bool, library: str, store_path: str
) -> None:
    found = run_ranks(2, aborted, NEW_BOARD, library, store_path, hangs)
    assert found == [int(hangs)] * 2


def closed_early(
    rank: int, n: int, board: BoardHandle, library: str, path: str
) -> tuple[float, int, int]:
    """Rank 0 closes while the device waits for rank 1's part: its sum, and what is left."""
    with Board.attach(board, rank) as mine:
        comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
        nccl = nccl_of(comm)
        window = make(nccl, NcclWindow.allocate(nccl, LIMIT))
        asked = operation(torch.ones(1))
        if rank == 1:
            meet(rank, n, path)
        nccl.start(asked)
        pytest.MonkeyPatch().setattr(nccl_core, "_FINISH", STALL_SECONDS + 20)
        if rank == 0:
            pytest.MonkeyPatch().setattr(nccl, "_passed", met(nccl._passed, rank, n, path))
        window.close()
        comm.close()
        fake = streams.fake
        return float(asked.output), fake.fakeMemories(), fake.fakeAborts()


def met(step: Callable[[], bool], *where: Any) -> Callable[[], bool]:
    def after_meeting() -> bool:
        meet(*where)
        return step()

    return after_meeting


def test_a_window_stays_until_the_device_is_done(library: str, store_path: str) -> None:
    found = run_ranks(2, closed_early, NEW_BOARD, library, store_path)
    assert found == [(2.0, 0, 0)] * 2


# --- the fake ----------------------------------------------------------------------------


@pytest.fixture
def lonely(library: str) -> Iterator[tuple[NcclLibrary, int]]:
    """A blocking communicator of one rank."""
    nccl = NcclLibrary(library)
    first = nccl.begin_init(1, nccl.unique_id(), 0)
    _settle(nccl, first)
    split = nccl.begin_split(first, 0)
    _settle(nccl, first)
    comm = split()
    yield nccl, comm
    nccl.abort(comm)
    nccl.abort(first)


def _settle(nccl: NcclLibrary, comm: int) -> None:
    while nccl.async_result(comm) != NcclResult.SUCCESS:
        pass


def test_the_fake_finds_misuse(lonely: tuple[NcclLibrary, int]) -> None:
    nccl, comm = lonely
    argument, usage = "INVALID_ARGUMENT", "INVALID_USAGE"
    memory, other = nccl.mem_alloc(LIMIT), nccl.mem_alloc(LIMIT)
    with pytest.raises(CoordinatorError, match=argument):
        nccl.window_register(comm, memory + 4096, 4096)
    with pytest.raises(CoordinatorError, match=argument):
        nccl.window_register(comm, memory, LIMIT + 1)
    window = nccl.window_register(comm, memory, LIMIT)
    with pytest.raises(CoordinatorError, match=usage):
        nccl.window_register(comm, memory, LIMIT)
    with pytest.raises(CoordinatorError, match=usage):
        nccl.mem_free(memory)
    second = nccl.window_register(comm, other, LIMIT)
    nccl.window_deregister(comm, window)
    with pytest.raises(CoordinatorError, match=argument):
        nccl.window_deregister(comm, window)
    nccl.mem_free(memory)
    with pytest.raises(CoordinatorError, match=argument):
        nccl.mem_free(memory)
    nccl.finalize(comm)
    with pytest.raises(CoordinatorError, match=usage):
        nccl.window_deregister(comm, second)
    with pytest.raises(CoordinatorError, match=usage):
        nccl.destroy(comm)
    nccl.abort(comm)
    nccl.mem_free(other)


def test_windows_need_all_their_functions(tmp_path: Path) -> None:
    with pytest.raises(NcclUnavailableError, match=r"NCCL 2\.26\.5 has no windows; 2\.27 has"):
        NcclLibrary(compile_fake(tmp_path, "-DBEFORE_WINDOWS")).check_windows()
