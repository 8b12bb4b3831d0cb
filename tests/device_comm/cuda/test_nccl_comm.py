"""The table over `NcclBackend` and a fake libnccl: real processes, CPU tensors. And its faults."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from unittest.mock import MagicMock, patch

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.nccl.core import HOLD_SECONDS
from device_comm.cuda.nccl.library import (
    TYPES,
    NcclError,
    NcclLibrary,
    NcclResult,
    NcclUnavailableError,
    Op,
    loaded_library,
)
from shm_broadcast import (
    Board,
    BoardHandle,
    CoordinatorError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
    TransportError,
)
from tests.commands import run_code
from tests.device_comm.cuda.fake_library import COMPILER
from tests.device_comm.cuda.fake_nccl import HostMark, compile_fake, make_nccl, nccl_of
from tests.device_comm.meeting import SOON, die, meet, wait_for_abort
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table
from tests.patience import until
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm import Communicator
    from tests.device_comm.cuda.fake_nccl import HostStreams

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a fake NCCL with")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_fake(tmp_path_factory.mktemp("nccl"))


def table(rank: int, n: int, board: BoardHandle, library: str, path: str) -> dict[str, str]:
    comm, _ = make_nccl(rank, n, board, library, path)
    with comm:
        dtypes = None if n == 2 else [torch.float32, torch.bool, torch.int16]
        return run_whole_table(comm, dtypes)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_table(n: int, library: str, store_path: str) -> None:
    check_table(run_ranks(n, table, NEW_BOARD, library, store_path))


# --- set-up ------------------------------------------------------------------------------


def absent(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    mine = Board.attach(board, rank)
    if rank == 1:
        mine.record_begin("loading weights")
    meet(rank, n, path)
    if rank == 1:
        return ""
    with pytest.raises(GroupTimeoutError) as info:
        make_nccl(rank, n, mine, library, path, set_up=0.5)
    assert [each.rank for each in info.value.waiting_for] == [1]
    return str(info.value)


def test_set_up_has_a_deadline_and_shows_who_is_absent(library: str, store_path: str) -> None:
    text = run_ranks(2, absent, NEW_BOARD, library, store_path)[0]
    assert "tp nccl set-up: timed out after 0.5 s" in text
    assert "last seen in loading weights" in text


def test_what_nccl_refuses_is_told_in_its_words(library: str) -> None:
    bound, fake = NcclLibrary(library), ctypes.CDLL(library)
    fake.fakeRefuseInit(5)
    try:
        with pytest.raises(NcclError, match=r"ncclCommInitRankConfig: INVALID_USAGE: fake error"):
            bound.begin_init(1, bound.unique_id(), 0)
    finally:
        fake.fakeRefuseInit(0)
    with pytest.raises(ValueError, match="128 bytes; got 3"):
        bound.begin_init(1, b"abc", 0)


# --- operations that do not end by themselves ----------------------------------------------


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
def test_a_lost_peer_frees_the_device(library: str, store_path: str, replay: bool) -> None:
    texts = run_ranks(3, lost, NEW_BOARD, library, store_path, replay, may_die=[2])
    for text in texts[:2]:
        assert "rank 2" in text


def late(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    x = torch.ones(100)
    if rank == 1:
        comm.watch.record_begin("thinking")
    meet(rank, n, path)
    if rank == 1:
        wait_for_abort(comm.watch)
    else:
        with suppress(GroupTimeoutError):  # the call itself, where its thread is the late one
            comm.all_reduce_(x, timeout=0.3)
        streams.synchronize()
    with pytest.raises(GroupAbortedError):
        comm.check()
    with pytest.raises(GroupAbortedError) as info:
        comm.barrier()
    return str(info.value)


def test_a_late_peer_is_named_on_all_ranks(library: str, store_path: str) -> None:
    texts = run_ranks(2, late, NEW_BOARD, library, store_path)
    for text in texts:
        assert "tp all_reduce: timed out after 0.3 s, waiting for rank 1" in text
        assert "last seen in thinking" in text


def aborted(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    x = torch.ones(70_000)
    if rank == 0:
        comm.recv(out=x, src=1)  # returns: it is on the stream
    meet(rank, n, path)
    if rank == 1:
        comm.abort("enough")
    else:
        streams.synchronize()
    with pytest.raises(GroupAbortedError) as info:
        comm.send(x, 1 - rank)
    return str(info.value)


def test_an_abort_reaches_the_device(library: str, store_path: str) -> None:
    for text in run_ranks(2, aborted, NEW_BOARD, library, store_path):
        assert re.search(r"rank 1 reported: \w+: enough", text)


def refused(
    rank: int, n: int, board: BoardHandle, library: str, path: str, result: int
) -> tuple[str, str]:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    meet(rank, n, path)
    if rank == 1:
        streams.fake.fakeFailNext(result)
    x = torch.ones(3)
    with pytest.raises(CoordinatorError) as info:
        use(comm, streams, x)
    return type(info.value).__name__, str(info.value)


def use(comm: Communicator, streams: HostStreams, x: torch.Tensor) -> None:
    comm.all_reduce_(x)
    streams.synchronize()
    comm.barrier()


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (NcclResult.INVALID_ARGUMENT, NcclError, "tp all_reduce: ncclAllReduce: INVALID_ARGUMENT"),
        (NcclResult.REMOTE_ERROR, TransportError, "ncclAllReduce: REMOTE_ERROR: fake error"),
    ],
)
def test_an_error_of_a_call_ends_the_group(
    library: str, store_path: str, result: int, error: type[Exception], text: str
) -> None:
    other, own = run_ranks(2, refused, NEW_BOARD, library, store_path, result)
    assert own[0] == error.__name__
    assert text in own[1]
    assert other[0] == "GroupAbortedError"
    assert f"rank 1 reported: {error.__name__}" in other[1]


def stuck(rank: int, n: int, board: BoardHandle, library: str, path: str, ends: str) -> str:
    """NCCL does not return from rank 0's call, since a peer has yet to connect with it."""
    mine = Board.attach(board, rank)
    comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
    x = torch.ones(3)
    meet(rank, n, path)
    if rank == 1:
        if ends == "abort":
            until(lambda: mine.member_status(0).operation == "tp all_reduce")
            comm.abort("enough")
        else:
            comm.watch.record_begin("thinking")
            wait_for_abort(mine)
        return ""
    streams.fake.fakeStallNext()
    with pytest.raises(CoordinatorError) as info:
        comm.all_reduce_(x, timeout=0.3 if ends == "deadline" else 60)
    with pytest.raises(GroupAbortedError):
        comm.barrier()
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("deadline", "GroupTimeoutError: tp all_reduce: timed out after 0.3 s, waiting for rank 1"),
        ("abort", "GroupAbortedError: group tp all_reduce: .*rank 1 reported: .*enough"),
    ],
)
def test_a_call_from_which_nccl_does_not_return_is_ended(
    library: str, store_path: str, ends: str, said: str
) -> None:
    text = run_ranks(2, stuck, NEW_BOARD, library, store_path, ends)[0]
    assert re.match(said, text), text


def fails_behind(rank: int, n: int, board: BoardHandle, library: str, path: str) -> str:
    comm, streams = make_nccl(rank, n, board, library, path, patient=False)
    meet(rank, n, path)
    if rank == 1:
        wait_for_abort(comm.watch)
        with pytest.raises(GroupAbortedError) as aborted:
            comm.check()
        return str(aborted.value)
    x = torch.ones(3)
    comm.all_reduce_(x)
    at = ctypes.c_void_p(nccl_of(comm)._handle._comm)
    streams.fake.fakeFailBehind(at, NcclResult.REMOTE_ERROR)
    wait_for_abort(comm.watch)
    with pytest.raises(CoordinatorError) as failed:
        comm.check()
    return str(failed.value)


def test_what_fails_in_the_background_ends_the_group(library: str, store_path: str) -> None:
    texts = run_ranks(2, fails_behind, NEW_BOARD, library, store_path)
    for text in texts:
        assert "rank 0 reported: TransportError" in text
        assert "background work: REMOTE_ERROR: fake error; last words" in text


class Overslept(HostMark):
    """The rank's own thread is stalled until the device has passed; others look on."""

    def query(self) -> bool:
        if threading.current_thread() is threading.main_thread():
            until(super().query)
        return super().query()


def cut_short(rank: int, n: int, board: BoardHandle, library: str, path: str) -> None:
    mine = Board.attach(board, rank)
    comm, streams = make_nccl(rank, n, mine, library, path, patient=False)
    meet(rank, n, path)
    if rank == 1:
        until(lambda: mine.member_status(0).operation == "tp barrier")
        comm.abort("enough")
        return
    streams.mark_type = Overslept
    with pytest.raises(GroupAbortedError, match="tp barrier"):
        comm.barrier()


def test_a_barrier_that_an_abort_has_ended_does_not_return(library: str, store_path: str) -> None:
    run_ranks(2, cut_short, NEW_BOARD, library, store_path)


def ended_meanwhile(rank: int, n: int, board: BoardHandle, library: str, path: str) -> None:
    """Rank 0 is about to issue something when its guard ends what was issued before."""
    mine = Board.attach(board, rank)
    comm, _ = make_nccl(rank, n, mine, library, path, patient=False)
    x = torch.ones(3)
    if rank == 1:
        until(lambda: mine.member_status(0).operation == "tp broadcast")
        comm.abort("enough")
        return
    comm.all_reduce_(x)
    handle = nccl_of(comm)._handle
    issue = handle.issue

    def issue_late(enqueue: Callable[[NcclLibrary, int], None]) -> None:
        until(lambda: handle._comm is None)
        issue(enqueue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "issue", issue_late)
        with pytest.raises(GroupAbortedError, match="enough"):
            comm.broadcast_(x)


def test_what_is_issued_after_the_end_says_what_ended_it(library: str, store_path: str) -> None:
    run_ranks(2, ended_meanwhile, NEW_BOARD, library, store_path)


# --- order and end -------------------------------------------------------------------------


def ordered(rank: int, n: int, board: BoardHandle, library: str, path: str) -> list[float]:
    comm, _ = make_nccl(rank, n, board, library, path)
    other = 1 - rank
    sends = [comm.isend(torch.full((50_000,), 10.0 * rank + i), other) for i in range(3)]
    recvs = [comm.irecv((50_000,), torch.float32, other) for _ in range(3)]
    # A collective behind messages that nobody has waited for.
    total = comm.all_reduce(torch.ones(1), op=ReduceOp.SUM)
    values = [float(work.wait()[7]) for work in recvs]
    for work in sends:
        work.wait()
    comm.close()
    with pytest.raises(GroupClosedError):
        comm.barrier()
    comm.close()
    return [*values, float(total)]


def test_messages_arrive_in_order_and_before_what_follows(library: str, store_path: str) -> None:
    found = run_ranks(2, ordered, NEW_BOARD, library, store_path)
    assert found == [[10, 11, 12, 2], [0, 1, 2, 2]]


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


def test_a_message_that_nobody_waits_for_is_sent(library: str, store_path: str) -> None:
    assert run_ranks(2, unasked, NEW_BOARD, library, store_path) == [1.0, 1.0]


def nan_in_different_places(rank: int, n: int, library: str, path: str) -> None:
    nan = float("nan")
    comm, _ = make_nccl(rank, n, None, library, path)
    with comm:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.tensor([[nan, 1, 4], [1, nan, 5]][rank], dtype=dtype)
            for op, last in ((ReduceOp.MIN, 4.0), (ReduceOp.MAX, 5.0)):
                found = comm.all_reduce(x, op=op)
                assert found.isnan().tolist() == [True, True, False]
                assert found[-1] == last


def test_what_is_not_a_number_stays_none_whichever_rank_has_it(
    library: str, store_path: str
) -> None:
    run_ranks(2, nan_in_different_places, library, store_path)


def unwatched(rank: int, n: int, library: str, path: str) -> float:
    comm, _ = make_nccl(rank, n, None, library, path)
    with comm:
        return float(comm.all_reduce(torch.tensor([rank + 1.0]), op=ReduceOp.AVG))


def test_without_a_board(library: str, store_path: str) -> None:
    assert run_ranks(2, unwatched, library, store_path) == [1.5, 1.5]


def test_flush_waits_for_the_device(library: str, store_path: str) -> None:
    run_ranks(2, flushed, NEW_BOARD, library, store_path)


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


# --- the library ---------------------------------------------------------------------------

MAPS = """\
7f1000000000-7f1000001000 r--p 00000000 08:01 11 /usr/lib/libc.so.6
7f1000001000-7f1000002000 rw-p 00000000 00:00 0
7f1000002000-7f1000003000 r--p 00000000 08:01 12 /a venv/nvidia/nccl/lib/libnccl.so.2
7f1000003000-7f1000004000 r-xp 00000000 08:01 12 /a venv/nvidia/nccl/lib/libnccl.so.2
"""


def test_the_loaded_library_is_found_among_the_mappings() -> None:
    lines = MAPS.splitlines(keepends=True)
    assert loaded_library(lines) == "/a venv/nvidia/nccl/lib/libnccl.so.2"
    assert loaded_library(lines[:2]) is None


def test_versions(library: str) -> None:
    assert NcclLibrary(library).version == (2, 28, 9)


def test_numbers_are_those_of_the_public_header() -> None:
    """By hand, from nccl.h: the fake knows these numbers, and so do all releases from 2.14 on."""
    names = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
    names += ["float16", "float32", "float64", "bfloat16"]
    assert {getattr(torch, name): number for number, name in enumerate(names)} == TYPES
    assert [op.name for op in Op] == ["SUM", "PROD", "MAX", "MIN", "AVG"]
    assert [int(op) for op in Op] == [0, 1, 2, 3, 4]
    assert (NcclResult.INVALID_USAGE, NcclResult.REMOTE_ERROR, NcclResult.IN_PROGRESS) == (5, 6, 7)


ALONE = """
from device_comm.cuda.nccl.library import NcclLibrary
try:
    print(NcclLibrary.of_torch().version >= (2, 14, 0))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_the_library_of_torch() -> None:
    """In a process of its own, as this one may have loaded the fake."""
    done = run_code(ALONE, timeout=240)
    if torch.version.cuda is None:
        assert done.stdout.startswith("NcclUnavailableError: torch ")
        assert "has loaded no libnccl" in done.stdout
    else:
        assert done.stdout == "True\n"


def test_a_library_that_cannot_be_used(tmp_path: object) -> None:
    with pytest.raises(NcclUnavailableError, match="nowhere"):
        NcclLibrary(f"{tmp_path}/nowhere.so")
    with pytest.raises(NcclUnavailableError, match="cannot be used"):
        NcclLibrary("libc.so.6")


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


def test_what_is_held_back_before_a_capture_is_none_of_the_graph(
    library: str, store_path: str
) -> None:
    run_ranks(2, held_before_a_capture, NEW_BOARD, library, store_path)
