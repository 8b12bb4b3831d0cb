"""What TorchBackend does with deadlines, broken connections, errors before and after torch."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import weakref
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from device_comm import Communicator, ReduceOp, TorchBackend, torch_backend, torch_waiting, watchdog
from device_comm.torch_waiting import ErrorTranslator
from device_comm.watch import LoneWatch
from shm_broadcast import (
    Board,
    BoardHandle,
    CoordinatorError,
    Deadline,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
)
from shm_broadcast.errors import TransportError
from tests.device_comm.meeting import SOON, meet
from tests.device_comm.shm_ranks import on_ranks
from tests.forked import in_a_child
from tests.patience import failure_of, until
from tests.programs import Program
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def make(rank: int, n: int, path: str, board: BoardHandle) -> Communicator:
    group = init_gloo(rank, n, path)
    comm = Communicator(
        TorchBackend(group, "cpu", Board.attach(board, rank), name="tp", timeout=20)
    )
    comm.barrier()
    meet(rank, n, path)
    return comm


def one_gives_up(rank: int, n: int, path: str, board: BoardHandle) -> CoordinatorError:
    """Each receives from the other, the first for a moment only; it is then held up."""
    comm = make(rank, n, path, board)

    def held_up(*arguments: Any) -> None:
        try:
            watchdog.call_watched(*arguments)
        except BaseException:
            until(lambda: comm.watch.aborted)
            raise

    if rank == 0:
        vars(torch_backend)["call_watched"] = held_up
    timeout = 20 if rank else 0.3
    error, _ = failure_of(lambda: comm.recv((5,), torch.float32, 1 - rank, timeout=timeout))
    meet(rank, n, f"{path}.over")
    return error


def test_peers_receive_a_deadline_before_connections_break(store_path: str) -> None:
    error, told = run_ranks(2, one_gives_up, store_path, NEW_BOARD)
    assert isinstance(error, GroupTimeoutError), error
    assert error.timeout == 0.3
    assert [member.rank for member in error.waiting_for] == [1]
    assert isinstance(told, GroupAbortedError), told
    assert (told.failure.rank, told.failure.kind) == (0, "GroupTimeoutError")


@pytest.mark.parametrize("sent", [True, False])
def test_a_peer_that_has_closed_is_named_unless_it_had_sent(sent: bool) -> None:
    arrived, began = threading.Event(), time.monotonic()
    named = pytest.raises(PeerLostError, match=r"recv: rank 1 \(pid \d+\) has closed the group, ")
    if sent:
        threading.Timer(0.5, arrived.set).start()
    with Board.create(2, 0) as board, nullcontext() if sent else named:
        Board.attach(board.handle(), 1).close()
        limit = Deadline.after(3 * SOON)
        ErrorTranslator(board).wait(arrived.is_set, limit, "recv", [1], poll=0.01)
    assert arrived.is_set() is sent
    assert time.monotonic() - began < 2 * SOON


def leaves(rank: int, n: int, path: str, board: BoardHandle, fails: bool) -> list[str]:
    """What is left of a communicator that was used and closed: threads, and the backend."""
    init_gloo(rank, n, path)
    group = dist.new_group([0, 1])
    watch = Board.attach(board, rank)
    before = {*threading.enumerate()}
    gc.disable()
    try:
        comm = Communicator(TorchBackend(group, "cpu", watch, name="tp", timeout=20))
        backend = weakref.ref(comm.backend)
        comm.all_reduce(torch.ones(3))
        exchange_messages(rank, comm)
        if fails:
            fail_to_receive(rank, comm, watch)
        comm.close()
        del comm
        until(lambda: {*threading.enumerate()} == before, "a thread is left")
        return [] if backend() is None else ["the backend"]
    finally:
        gc.enable()


def exchange_messages(rank: int, comm: Communicator) -> None:
    following = iter([[torch.empty(3)], []])
    for sender in (0, 1):
        if rank == sender:
            comm.send(torch.ones(3), 1 - rank)
            comm.isend(torch.ones(3), 1 - rank).wait()
            comm.send(torch.ones(3), 1 - rank)
        else:
            comm.recv((3,), torch.float32, sender)
            comm.irecv((3,), torch.float32, sender).wait()
            comm.irecv_series(lambda: next(following), sender).wait()


def fail_to_receive(rank: int, comm: Communicator, watch: Board) -> None:
    if rank == 0:
        until(lambda: watch.member_status(1).operation == "tp recv")
        comm.abort("wanted")
        return
    with pytest.raises(GroupAbortedError, match="wanted"):
        comm.recv((3,), torch.float32, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_closed_communicator(fails: bool, store_path: str) -> None:
    """At once, without a collection: a process may make and close groups all day."""
    assert run_ranks(2, leaves, store_path, NEW_BOARD, fails) == [[], []]


def time_out_and_end(path: str) -> None:
    comm = Communicator(TorchBackend(init_gloo(0, 2, path, timeout=300), timeout=0.2))
    for call in (lambda: comm.all_reduce(torch.ones(1)), lambda: comm.recv((1,), torch.float32)):
        sys.stdout.write(f"{type(failure_of(call)[0]).__name__} ")


def be_late(path: str) -> None:
    init_gloo(1, 2, path, timeout=300)
    until(Path(f"{path}.ended").exists)
    os._exit(0)


def test_a_call_that_hangs_does_not_delay_the_exit(store_path: str) -> None:
    late, ends = Program(be_late, store_path), Program(time_out_and_end, store_path)
    said = ends.communicate()
    Path(f"{store_path}.ended").touch()
    late.communicate()
    assert (ends.returncode, said) == (0, ("GroupTimeoutError GroupAbortedError ", ""))


def give_up(rank: int, n: int, path: str, board: BoardHandle) -> list[int]:
    """How many of torch's works are kept after each round, and after one that times out."""
    comm = make(rank, n, path, board)
    kept = []
    for _ in range(3):
        comm.all_reduce(torch.ones(1))
        comm.all_reduce(torch.ones(1), async_op=True).wait()
        kept.append(len(torch_waiting._kept))
    if rank == 0:
        failure_of(lambda: comm.all_reduce(torch.ones(1), timeout=0.2))
        kept.append(len(torch_waiting._kept))
        in_a_child(lambda: torch_waiting._kept and os._exit(1))
    return kept


def test_torchs_thread_does_not_drop_a_work_that_was_given_up(store_path: str) -> None:
    """Python's end would end that thread, and with it the process: see `under_way`."""
    assert run_ranks(2, give_up, store_path, NEW_BOARD) == [[0, 0, 0, 1], [0, 0, 0]]


# --- What cannot begin, and numbers that are none ------------------------------------------------


@on_ranks(2)
def test_a_series_may_have_tensors_without_elements(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    sent = [torch.empty(0), torch.full((2,), 1.0), torch.empty(0), torch.full((2,), 2.0)]
    with make(rank, n, path, board) as comm:
        for asynchronous in (True, False):
            if rank == 0:
                for x in sent:
                    comm.send(x, dst=1)
                continue
            received = [torch.zeros_like(x) for x in sent]
            parts = iter([received[:2], received[2:3], received[3:], []])
            if asynchronous:
                comm.irecv_series(partial(next, parts), 0).wait(30)
            else:
                for x in received:
                    comm.recv(out=x, src=0, timeout=30)
            assert [x.tolist() for x in received] == [x.tolist() for x in sent]
        comm.barrier()


CANNOT_BEGIN = {
    "all_reduce": ("transport_reduction", MemoryError),
    "broadcast": ("as_transport_dtype", RuntimeError),
    "all_gather": ("as_transport_dtype", RuntimeError),
    "send": ("as_transport_dtype", RuntimeError),
    "isend": ("as_transport_dtype", MemoryError),
    "irecv": ("as_transport_dtype", RuntimeError),
}
"""Verbs, and what fails in them before torch is called: no error of a connection."""


def fails_to_begin(rank: int, n: int, path: str, boards: list[BoardHandle]) -> None:
    """Rank 1 cannot begin a verb; what it does next is no answer to what rank 0 has begun."""
    init_gloo(rank, n, path)
    x = torch.ones(4, dtype=torch.bfloat16)
    for board, (verb, (place, error)) in zip(boards, CANNOT_BEGIN.items(), strict=True):
        group = dist.new_group([0, 1])
        with Communicator(TorchBackend(group, "cpu", Board.attach(board, rank))) as comm:
            comm.barrier()
            out_of_it = Path(f"{path}-{verb}")
            if rank == 1:
                until(out_of_it.exists)  # what ends the group may overtake what else was sent
                call: Any = getattr(comm, verb)
                how = {"out": x} if verb == "irecv" else {"x": x}
                failing = Mock(side_effect=error("no room"))
                with (
                    mock.patch(f"device_comm.torch_backend.{place}", failing),
                    pytest.raises(error, match="no room"),
                ):
                    call(**how)
            else:
                out_of_it.touch()
                reported = f"rank 1 reported: {error.__name__}: no room"
                with pytest.raises(GroupAbortedError, match=reported):
                    comm.all_reduce(x)
            with pytest.raises(GroupAbortedError, match="no room"):
                comm.all_reduce(x)


def test_a_rank_that_cannot_begin_ends_the_group(store_path: str) -> None:
    with ExitStack() as closing:
        boards = [closing.enter_context(Board.create(2, None)) for _ in CANNOT_BEGIN]
        run_ranks(2, fails_to_begin, store_path, [board.handle() for board in boards])


@on_ranks(3)
def test_nan_stays_nan_whichever_rank_has_it(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    nan = math.nan
    with Communicator(TorchBackend(init_gloo(rank, n, path))) as comm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            x = torch.tensor([[nan, 1, 2, 4], [1, nan, 3, 4], [1, 1, nan, 5]][rank], dtype=dtype)
            largest = comm.all_reduce(x, op=ReduceOp.MAX)
            assert largest.isnan().tolist() == [True, True, True, False]
            assert largest[3] == 5
            least = comm.reduce(x, op=ReduceOp.MIN, dst=0)
            if least is not None:
                assert least.isnan().tolist() == [True, True, True, False]
                assert least[3] == 4


# --- The cause of a broken connection ------------------------------------------------------------

LOST = PeerLostError("tp recv", MemberStatus(1, 4, "lost"))
BROKE = RuntimeError("Connection closed by peer\nand a trace")


def translated(watch: SlowNews, timeout: float) -> Exception:
    return ErrorTranslator(watch).translate(BROKE, "tp recv", [1], Deadline.after(timeout))


class SlowNews(LoneWatch):
    """Knows after so many looks that a peer was lost, or that none was."""

    def __init__(self, lost_at: float, known_at: float) -> None:
        super().__init__(0)
        self.looks = 0
        self._lost_at = lost_at
        self._known_at = known_at

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        assert list(members) == [1]
        return lambda: self.looks >= self._known_at

    def wait(self, ready: Callable[[], bool], deadline: Deadline, *_: object, **__: object) -> None:
        while not ready():
            if self.looks >= self._lost_at:
                raise LOST
            if deadline.expired:
                raise GroupTimeoutError("tp recv", deadline.timeout)
            self.looks += 1
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("lost_at", "known_at", "timeout"),
    [(200, 300, 60), (50, 10**9, 0.01)],
    ids=["however long its news takes", "though the deadline is near"],
)
def test_the_cause_of_a_broken_connection_is_waited_for(
    lost_at: float, known_at: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if timeout > 1:
        monkeypatch.setattr(torch_waiting, "_CAUSE_SECONDS", 0.0)
    assert translated(SlowNews(lost_at, known_at), timeout) is LOST


def test_no_rank_is_blamed_once_all_are_known_to_be_there() -> None:
    watch = SlowNews(lost_at=10**9, known_at=5)
    error = translated(watch, timeout=60)
    assert isinstance(error, TransportError)
    assert error.rank == 1
    assert "Connection closed by peer" in str(error)
    assert "trace" not in str(error)
    assert watch.looks == 5


def test_an_unknown_cause_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_waiting, "_CAUSE_SECONDS", 0.0)
    began = time.monotonic()
    error = translated(SlowNews(lost_at=10**9, known_at=10**9), timeout=0.05)
    assert isinstance(error, TransportError)
    assert 0.05 <= time.monotonic() - began < 30
    late = translated(SlowNews(lost_at=10**9, known_at=10**9), timeout=0)
    assert isinstance(late, GroupTimeoutError)
    assert late.timeout == 0
