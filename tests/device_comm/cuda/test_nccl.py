"""`NcclBackend` and `NcclWindow` over a fake libnccl: real processes, CPU tensors."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

from coordinator.cuda_candidates import try_together
from device_comm import Communicator, Operation, ReduceOp
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.nccl import core as nccl_core
from device_comm.cuda.nccl.core import HOLD_SECONDS, NcclForming
from device_comm.cuda.nccl.library import (
    TYPES,
    NcclError,
    NcclLibrary,
    NcclResult,
    NcclUnavailableError,
    Op,
    loaded_library,
)
from device_comm.cuda.nccl.nccl_backend import NcclWindow
from device_comm.selection import Candidate, SelectingBackend, Selection
from shm_broadcast import (
    Board,
    BoardHandle,
    CoordinatorError,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
    TransportError,
)
from tests.device_comm.cuda.fakes import COMPILER, HostMark, compile_nccl, make_nccl, nccl_of
from tests.device_comm.meeting import SOON, die, meet, wait_for_abort
from tests.device_comm.shm_ranks import make_comm
from tests.device_comm.suite import check_table, run_whole_table
from tests.patience import STALL_SECONDS, until
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from device_comm.cuda.nccl.core import NcclMemory
    from device_comm.cuda.nccl.nccl_backend import NcclBackend

    Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a fake NCCL with")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_nccl(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def run(library: str, store_path: str) -> Run:
    """Runs ``body(rank, n, board, library, path, *args)`` in n processes."""

    def run(n: int, body: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        return run_ranks(n, body, NEW_BOARD, library, store_path, *args, **how)

    return run


def table(rank: int, n: int, board: BoardHandle, library: str, path: str) -> dict[str, str]:
    comm, _ = make_nccl(rank, n, board, library, path)
    with comm:
        return run_whole_table(comm, None if n == 2 else [torch.float32])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_table(n: int, run: Run) -> None:
    check_table(run(n, table))


# --- set-up ------------------------------------------------------------------------------


def absent(rank: int, n: int, board: BoardHandle, library: str, path: str, what: str) -> str:
    """What rank 0 raises in set-up, or when it makes a window, to which rank 1 does not come."""
    mine = Board.attach(board, rank)
    if what == "window":
        comm, _ = make_nccl(rank, n, mine, library, path)
        make_it = partial(make, nccl_of(comm), NcclWindow.allocate(nccl_of(comm), LIMIT), 0.5)
    else:
        make_it = partial(make_nccl, rank, n, mine, library, path, set_up=0.5)
    if rank == 1:
        mine.record_begin("thinking")
    meet(rank, n, path)
    if rank == 1:
        if what == "window":
            wait_for_abort(mine)
        return ""
    with pytest.raises(GroupTimeoutError) as info:
        make_it()
    assert [each.rank for each in info.value.waiting_for] == [1]
    return str(info.value)


@pytest.mark.parametrize("what", ["set-up", "window"])
def test_set_up_has_a_deadline_and_names_the_absent_rank(run: Run, what: str) -> None:
    text = run(2, absent, what)[0]
    assert f"tp nccl {what}: timed out after 0.5 s, waiting for rank 1" in text
    assert "last seen in thinking" in text


def test_set_up_raises_nccls_error(library: str) -> None:
    bound, fake = NcclLibrary(library), ctypes.CDLL(library)
    assert bound.version == (2, 28, 9)
    fake.fakeRefuseInit(5)
    try:
        with pytest.raises(NcclError, match=r"ncclCommInitRankConfig: INVALID_USAGE: fake error"):
            bound.begin_init(1, bound.unique_id(), 0)
    finally:
        fake.fakeRefuseInit(0)
    with pytest.raises(ValueError, match="128 bytes; got 3"):
        bound.begin_init(1, b"abc", 0)


@pytest.mark.parametrize(
    ("fails", "aborted"),
    [
        ("", []),
        ("async_result", [1]),
        ("begin_split", [1]),
        ("made", [1]),
        ("finalize", [2, 1]),
    ],
)
def test_communicators_in_creation_are_freed_once(fails: str, aborted: list[int]) -> None:
    """The first is destroyed once the second is there; after an error all are aborted."""
    library, made = Mock(), Mock(return_value=2)
    library.begin_init.return_value = 1
    library.async_result.return_value = NcclResult.SUCCESS
    library.begin_split.return_value = made
    if fails:
        call = made if fails == "made" else getattr(library, fails)
        call.side_effect = NcclError(fails, NcclResult.REMOTE_ERROR)
    forming = NcclForming(library, 2, b"", 0)
    used: list[int] = []
    with pytest.raises(NcclError, match=f"{fails}: REMOTE_ERROR") if fails else nullcontext():
        handle = forming.finish(lambda settled: None if settled() else pytest.fail("not settled"))
        handle.issue(lambda _, comm: used.append(comm))
    forming.abort()
    assert used == ([] if fails else [2])
    assert [call.args[0] for call in library.destroy.mock_calls] == ([] if fails else [1])
    assert [call.args[0] for call in library.abort.mock_calls] == aborted


# --- operations that do not end by themselves --------------------------------------------


# In these tests the stream may hold an operation when the call has returned: tensors are kept.


def lost(rank: int, n: int, board: BoardHandle, library: str, path: str, replay: bool) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    x = torch.ones(100)
    if rank < n - 1:
        streams.captures = replay
        comm.all_reduce_(x)  # returns: it is on the stream
        streams.captures = False
    meet(rank, n, path)
    if rank == n - 1:
        die(path)
    began = time.monotonic()
    streams.synchronize()  # the user waits for the device, which waits for the lost one
    waited = time.monotonic() - began
    with pytest.raises((PeerLostError, GroupAbortedError)) as info:
        comm.all_reduce(x)
    assert waited < SOON
    return str(info.value)


@pytest.mark.parametrize("replay", [False, True])
def test_a_lost_peer_frees_the_device(run: Run, replay: bool) -> None:
    for text in run(3, lost, replay, may_die=[2])[:2]:
        assert "rank 2" in text


def held_up(rank: int, n: int, board: BoardHandle, library: str, path: str, how: str) -> str:
    """Rank 0's device waits for rank 1, which is late or aborts the group."""
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    x = torch.ones(70_000)
    if rank == 1:
        comm.watch.record_begin("thinking")
    elif how == "abort":
        comm.recv(out=x, src=1)  # returns: it is on the stream
    meet(rank, n, path)
    if rank == 0:
        if how == "late":
            with suppress(GroupTimeoutError):  # the call itself, where its thread is the late one
                comm.all_reduce_(x, timeout=0.3)
        streams.synchronize()
    elif how == "abort":
        comm.abort("enough")
    else:
        wait_for_abort(comm.watch)
    with pytest.raises(GroupAbortedError):
        comm.check()
    with pytest.raises(GroupAbortedError) as info:
        comm.barrier()
    return str(info.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "late",
            "tp all_reduce: timed out after 0.3 s, waiting for rank 1.* last seen in thinking",
        ),
        ("abort", r"rank 1 reported: \w+: enough"),
    ],
)
def test_a_deadline_or_an_abort_reaches_the_device(run: Run, how: str, said: str) -> None:
    for text in run(2, held_up, how):
        assert re.search(said, text), text


def refused(rank: int, n: int, board: BoardHandle, library: str, path: str, result: int) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    meet(rank, n, path)
    if rank == 1:
        streams.fake.fakeFailNext(result)
    x = torch.ones(3)

    def use() -> None:
        comm.all_reduce_(x)
        streams.synchronize()
        comm.barrier()

    with pytest.raises(CoordinatorError) as info:
        use()
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (NcclResult.INVALID_ARGUMENT, NcclError, "tp all_reduce: ncclAllReduce: INVALID_ARGUMENT"),
        (NcclResult.REMOTE_ERROR, TransportError, "ncclAllReduce: REMOTE_ERROR: fake error"),
    ],
)
def test_an_error_of_a_call_ends_the_group(
    run: Run, result: int, error: type[Exception], text: str
) -> None:
    other, own = run(2, refused, result)
    assert own.startswith(f"{error.__name__}: ") and text in own
    assert other.startswith("GroupAbortedError: ")
    assert f"rank 1 reported: {error.__name__}" in other


class Overslept(HostMark):
    """The rank's own thread is stalled until the device has passed; others look on."""

    def query(self) -> bool:
        if threading.current_thread() is threading.main_thread():
            until(super().query)
        return super().query()


def ended(rank: int, n: int, board: BoardHandle, library: str, path: str, how: str) -> str:
    """Rank 1 is late, or aborts the group while rank 0 is in an operation."""
    mine = Board.attach(board, rank)
    comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
    x = torch.ones(3)
    meet(rank, n, path)
    if rank == 1:
        comm.watch.record_begin("thinking")
        if how == "late":
            wait_for_abort(mine)
        else:
            verb = {"blocked": "all_reduce", "issued": "broadcast"}.get(how, how)
            until(lambda: mine.member_status(0).operation == f"tp {verb}")
            comm.abort("enough")
        return ""
    if how in ("late", "blocked"):
        # NCCL does not return from this call, since a peer has yet to connect with it.
        streams.fake.fakeStallNext()
        call = partial(comm.all_reduce_, x, timeout=0.3 if how == "late" else 60)
    elif how == "barrier":
        streams.mark_type = Overslept
        call = comm.barrier
    else:
        # About to issue something when its guard ends the operation before.
        comm.all_reduce_(x)
        handle = nccl_of(comm)._handle
        issue = handle.issue
        handle.issue = lambda enqueue: (until(lambda: handle._comm is None), issue(enqueue))[1]
        call = partial(comm.broadcast_, x)
    with pytest.raises(CoordinatorError) as info:
        call()
    with pytest.raises(GroupAbortedError):
        comm.barrier()
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("late", "GroupTimeoutError: tp all_reduce: timed out after 0.3 s, waiting for rank 1"),
        ("blocked", "GroupAbortedError: group tp all_reduce: .*rank 1 reported: .*enough"),
        ("barrier", "GroupAbortedError: group tp barrier: .*rank 1 reported: .*enough"),
        ("issued", "GroupAbortedError: group tp.*rank 1 reported: .*enough"),
    ],
)
def test_a_deadline_or_an_abort_ends_a_call_at_any_moment(run: Run, how: str, said: str) -> None:
    text = run(2, ended, how)[0]
    assert re.match(said, text), text


def fails_behind(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    meet(rank, n, path)
    x = torch.ones(3)
    if rank == 0:
        comm.all_reduce_(x)
        at = ctypes.c_void_p(nccl_of(comm)._handle._comm)
        streams.fake.fakeFailBehind(at, NcclResult.REMOTE_ERROR)
    wait_for_abort(comm.watch)
    with pytest.raises(CoordinatorError if rank == 0 else GroupAbortedError) as info:
        comm.check()
    return str(info.value)


def test_an_error_in_the_background_ends_the_group(run: Run) -> None:
    for text in run(2, fails_behind):
        assert "rank 0 reported: TransportError" in text
        assert "background work: REMOTE_ERROR: fake error; last words" in text


# --- order and end -----------------------------------------------------------------------


def ordered(rank: int, n: int, board: BoardHandle, library: str, path: str) -> list[float]:
    comm, _ = make_nccl(rank, n, board, library, path)
    other = 1 - rank
    sends = [comm.isend(torch.full((50_000,), 10.0 * rank + i), other) for i in range(3)]
    recvs = [comm.irecv((50_000,), torch.float32, other) for _ in range(3)]
    # A collective behind messages for which no rank waits.
    total = comm.all_reduce(torch.ones(1), op=ReduceOp.SUM)
    values = [float(work.wait()[7]) for work in recvs]
    for work in sends:
        work.wait()
    comm.close()
    with pytest.raises(GroupClosedError):
        comm.barrier()
    comm.close()
    return [*values, float(total)]


def test_messages_arrive_in_order_and_before_what_follows(run: Run) -> None:
    assert run(2, ordered) == [[10, 11, 12, 2], [0, 1, 2, 2]]


def unasked(rank: int, n: int, board: BoardHandle, library: str, path: str) -> float:
    comm, _ = make_nccl(rank, n, board, library, path, hold=HOLD_SECONDS)
    with comm:
        number = torch.tensor([rank + 1.0])
        if rank == 0:
            comm.isend(number, 1)
        else:
            comm.recv(out=number, src=0)
        meet(rank, n, path)
        return float(number)


def test_a_message_is_sent_without_a_wait(run: Run) -> None:
    assert run(2, unasked) == [1.0, 1.0]


def without_a_board(rank: int, n: int, library: str, path: str) -> float:
    """Minimum and maximum are not a number where a rank's number is none."""
    nan = float("nan")
    comm, _ = make_nccl(rank, n, None, library, path)
    with comm:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.tensor([[nan, 1, 4], [1, nan, 5]][rank], dtype=dtype)
            for op, last in ((ReduceOp.MIN, 4.0), (ReduceOp.MAX, 5.0)):
                found = comm.all_reduce(x, op=op)
                assert found.isnan().tolist() == [True, True, False]
                assert found[-1] == last
        return float(comm.all_reduce(torch.tensor([rank + 1.0]), op=ReduceOp.AVG))


def test_nan_spreads_and_no_board_is_needed(library: str, store_path: str) -> None:
    assert run_ranks(2, without_a_board, library, store_path) == [1.5, 1.5]


def flushed(rank: int, n: int, board: BoardHandle, library: str, path: str) -> None:
    comm, _ = make_nccl(rank, n, board, library, path, patient=False)
    with comm:
        x = torch.full((300_000,), rank + 1.0)
        if rank == 0:
            y = comm.all_reduce(x)
            with pytest.raises(GroupTimeoutError, match="tp flush"):
                comm.flush(0.05)
        meet(rank, n, path)
        if rank == 1:
            y = comm.all_reduce(x)
        comm.flush()
        assert y.unique().tolist() == [3.0]


def test_flush_waits_for_the_device(run: Run) -> None:
    run(2, flushed)


def held_before_a_capture(rank: int, n: int, board: BoardHandle, library: str, path: str) -> None:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    x, y = torch.ones(8), torch.zeros(8)
    issued = MagicMock(wraps=nccl_of(comm)._put)
    with patch.object(nccl_of(comm), "_put", issued):
        work = comm.isend(x, 1) if rank == 0 else comm.irecv(out=y, src=0)
        with comm.graph_capture():
            streams.captures = True
            comm.all_reduce_(torch.ones(8))
            streams.captures = False
    assert [call.args[-1] for call in issued.call_args_list] == [False, True]
    work.wait()
    streams.synchronize()
    assert rank == 0 or torch.equal(x, y)
    comm.close()


def test_a_message_held_before_a_capture_is_not_in_the_graph(run: Run) -> None:
    run(2, held_before_a_capture)


# --- the library -------------------------------------------------------------------------

MAPS = """\
7f1000000000-7f1000001000 r--p 00000000 08:01 11 /usr/lib/libc.so.6
7f1000001000-7f1000002000 rw-p 00000000 00:00 0
7f1000002000-7f1000003000 r--p 00000000 08:01 12 /a venv/nvidia/nccl/lib/libnccl.so.2
7f1000003000-7f1000004000 r-xp 00000000 08:01 12 /a venv/nvidia/nccl/lib/libnccl.so.2
"""


@pytest.mark.quick
def test_the_loaded_library_is_found_among_the_mappings(tmp_path: Path) -> None:
    lines = MAPS.splitlines(keepends=True)
    assert loaded_library(lines) == "/a venv/nvidia/nccl/lib/libnccl.so.2"
    assert loaded_library(lines[:2]) is None
    with pytest.raises(NcclUnavailableError, match="nowhere"):
        NcclLibrary(f"{tmp_path}/nowhere.so")
    with pytest.raises(NcclUnavailableError, match="cannot be used"):
        NcclLibrary("libc.so.6")


@pytest.mark.quick
def test_numbers_are_those_of_the_public_header() -> None:
    """By hand, from nccl.h: the fake knows these numbers, and so do all releases from 2.14 on."""
    names = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
    names += ["float16", "float32", "float64", "bfloat16"]
    assert {getattr(torch, name): number for number, name in enumerate(names)} == TYPES
    assert [op.name for op in Op] == ["SUM", "PROD", "MAX", "MIN", "AVG"]
    assert [int(op) for op in Op] == [0, 1, 2, 3, 4]
    assert (NcclResult.INVALID_USAGE, NcclResult.REMOTE_ERROR, NcclResult.IN_PROGRESS) == (5, 6, 7)


def found_in_torch(rank: int, n: int) -> str:
    try:
        return str(NcclLibrary.of_torch().version >= (2, 14, 0))
    except NcclUnavailableError as error:
        return str(error)


def test_the_library_of_torch() -> None:
    """In a process of its own, as this one may have loaded the fake."""
    (found,) = run_ranks(1, found_in_torch)
    assert found == "True" or (torch.version.cuda is None and "has loaded no libnccl" in found)


# --- windows -----------------------------------------------------------------------------

LIMIT = 8192
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def host_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def make(nccl: NcclBackend, memory: NcclMemory | None = None, seconds: float = 20.0) -> NcclWindow:
    memory = memory or NcclWindow.allocate(nccl, LIMIT)
    return NcclWindow(nccl, memory, Deadline.after(seconds), host_bytes)


def operation(x: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation:
    return Operation("all_reduce", x, x.clone(), op=op, timeout=20.0, name="tp all_reduce")


def reduced(rank: int, n: int, board: BoardHandle, library: str, path: str) -> tuple[int, int]:
    """How many operations were in windows, and how many memories are left."""
    comm, streams = make_nccl(rank, n, board, library, path)
    with comm:
        window = make(nccl_of(comm))
        through = Communicator(window)
        for dtype in FLOATS:
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


@pytest.mark.parametrize("n", [2, 3])
def test_sums_are_made_in_the_window(n: int, run: Run) -> None:
    assert run(n, reduced) == [(len(FLOATS) * 4 * 3, 0)] * n


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
        # More than there is, where it is to fail.
        size = 1 << 60 if (how, rank) == ("full", 1) else LIMIT
        made = try_together(
            "nccl window",
            lambda: NcclWindow.allocate(nccl, size),
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
def test_windows_are_offered_on_all_ranks_or_none(
    how: str, refused: str, left: int, library: str, store_path: str, tmp_path: Path
) -> None:
    if how == "old":
        library = compile_nccl(tmp_path, "-DBEFORE_WINDOWS")
    found = run_ranks(2, offered, NEW_BOARD, library, store_path, how)
    assert found == [(refused, "nccl", left)] * 2


def aborted_window(
    rank: int, n: int, board: BoardHandle, library: str, path: str, hangs: bool
) -> int:
    """How many memories are left. ``hangs``: as if the device were not done by then."""
    with Board.attach(board, rank) as mine:
        comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
        window = make(nccl_of(comm))
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
def test_an_abort_frees_memory_that_the_device_does_not_use(run: Run, hangs: bool) -> None:
    assert run(2, aborted_window, hangs) == [int(hangs)] * 2


def closed_early(
    rank: int, n: int, board: BoardHandle, library: str, path: str
) -> tuple[float, int, int]:
    """Rank 0 closes while the device waits for rank 1's part: its sum, and what is left."""
    with Board.attach(board, rank) as mine:
        comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
        nccl = nccl_of(comm)
        window = make(nccl)
        asked = operation(torch.ones(1))
        if rank == 1:
            meet(rank, n, path)
        nccl.start(asked)
        pytest.MonkeyPatch().setattr(nccl_core, "_FINISH", STALL_SECONDS + 20)
        if rank == 0:
            passed = nccl._passed
            meets = lambda: (meet(rank, n, path), passed())[1]  # noqa: E731 - in its place
            pytest.MonkeyPatch().setattr(nccl, "_passed", meets)
        window.close()
        comm.close()
        fake = streams.fake
        return float(asked.output), fake.fakeMemories(), fake.fakeAborts()


def test_a_window_stays_until_the_device_is_done(run: Run) -> None:
    assert run(2, closed_early) == [(2.0, 0, 0)] * 2
