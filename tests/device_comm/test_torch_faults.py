"""What `TorchBackend` does when a peer dies, aborts, is late or is wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from device_comm import Communicator, ReduceOp, TorchBackend, torch_backend, torch_waiting, watchdog
from device_comm.torch_waiting import ErrorTranslator
from shm_broadcast import (
    Board,
    BoardHandle,
    CoordinatorError,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from shm_broadcast.errors import TransportError
from tests.commands import run_to_end
from tests.device_comm.meeting import SOON, die, meet, moment_of_death, wait_twice
from tests.forked import in_a_child
from tests.patience import NAMED_WITHIN, failure_of, quickest, until
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from device_comm.watch import Watch

Verb = str


def make(rank: int, n: int, path: str, board: BoardHandle | None) -> Communicator:
    group = init_gloo(rank, n, path)
    watch = None if board is None else Board.attach(board, rank)
    comm = Communicator(TorchBackend(group, "cpu", watch, name="tp", timeout=20))
    comm.barrier()
    meet(rank, n, path)
    return comm


def start(comm: Communicator, verb: Verb) -> object:
    """Begin something that needs every peer, or the next one."""
    x = torch.ones(comm.world_size, 100_000)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "product": lambda: comm.all_reduce(x.to(torch.complex64), op=ReduceOp.PRODUCT),
        "all_gather": lambda: comm.all_gather(x),
        "all_gatherv": lambda: comm.all_gatherv(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x, dim=0),
        "all_to_all": lambda: comm.all_to_all(x),
        "recv": lambda: comm.recv((5,), torch.float32, comm.world_size - 1),
        "barrier": lambda: comm.barrier(),
        "work": lambda: comm.all_reduce(x, async_op=True).wait(),
        "irecv": lambda: comm.irecv((5,), torch.float32, comm.world_size - 1).wait(),
    }
    return calls[verb]()


VERBS = [
    "all_reduce",
    "product",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "all_to_all",
    "recv",
    "barrier",
    "work",
    "irecv",
]


def last_is_killed(
    rank: int, n: int, path: str, board: BoardHandle | None, verb: Verb
) -> tuple[CoordinatorError, CoordinatorError, float]:
    comm = make(rank, n, path, board)
    if rank == n - 1:
        time.sleep(0.3)
        die(path)
    error, raised = failure_of(lambda: start(comm, verb))
    later = failure_of(lambda: comm.all_reduce(torch.ones(1)))[0]
    return error, later, raised - moment_of_death(path)


@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_peer_is_named_within_a_second(verb: Verb, tmp_path: Path) -> None:
    def attempt() -> float:
        return seconds_until_named(verb, mkdtemp(dir=tmp_path) + "/store")

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def seconds_until_named(verb: Verb, path: str) -> float:
    n = 3
    *survivors, _ = run_ranks(n, last_is_killed, path, NEW_BOARD, verb, may_die=[n - 1])
    for error, later, _ in survivors:
        if isinstance(error, PeerLostError):
            assert error.rank == n - 1
        else:
            assert isinstance(error, GroupAbortedError)
            assert error.failure.kind == "PeerLostError"
        assert isinstance(later, GroupAbortedError)
        assert f"lost rank {n - 1}" in later.failure.message
    return max(seconds for _, _, seconds in survivors)


def test_a_killed_peer_without_a_board(tmp_path: Path) -> None:
    def attempt() -> float:
        path = mkdtemp(dir=tmp_path) + "/store"
        (error, later, seconds), _ = run_ranks(
            2, last_is_killed, path, None, "all_reduce", may_die=[1]
        )
        assert isinstance(error, TransportError)
        assert error.rank == 1
        assert isinstance(later, GroupAbortedError)
        return float(seconds)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def last_aborts(
    rank: int, n: int, path: str, board: BoardHandle, verb: Verb
) -> tuple[CoordinatorError, float]:
    comm = make(rank, n, path, board)
    if rank == n - 1:
        time.sleep(0.3)
        comm.abort(KeyError("the reason"))
        return failure_of(lambda: start(comm, "all_reduce"))
    return failure_of(lambda: start(comm, verb))


@pytest.mark.parametrize("verb", VERBS)
def test_an_abort_frees_whoever_waits(verb: Verb, tmp_path: Path) -> None:
    def attempt() -> float:
        path = mkdtemp(dir=tmp_path) + "/store"
        results = run_ranks(2, last_aborts, path, NEW_BOARD, verb)
        for error, _ in results:
            assert isinstance(error, GroupAbortedError)
            assert (error.failure.rank, error.failure.kind) == (1, "KeyError")
            assert "the reason" in error.failure.message
        (_, freed), (_, refused) = results
        return float(freed - refused)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def last_is_late(
    rank: int, n: int, path: str, board: BoardHandle | None, verb: Verb
) -> tuple[CoordinatorError, CoordinatorError | None, float]:
    comm = make(rank, n, path, board)
    x = torch.ones(3)
    over = f"{path}.over"
    if rank == n - 1:
        meet(rank, n, over)
        return failure_of(lambda: comm.all_reduce(x))[0], None, 0.0
    comm.backend.timeout = 0.3
    began = time.monotonic()
    error, raised = failure_of(lambda: start(comm, verb))
    meet(rank, n, over)
    return error, failure_of(lambda: comm.all_reduce(x))[0], raised - began


@pytest.mark.parametrize("verb", ["all_reduce", "recv"])
def test_a_deadline_names_the_late_and_ends_the_group(verb: Verb, store_path: str) -> None:
    first, second = run_ranks(2, last_is_late, store_path, NEW_BOARD, verb)
    error, later, seconds = first
    assert isinstance(error, GroupTimeoutError)
    assert [member.rank for member in error.waiting_for] == [1]
    assert error.timeout == 0.3
    assert 0.29 < seconds < SOON
    for ended in (later, second[0]):
        assert isinstance(ended, GroupAbortedError)
        assert ended.failure.rank == 0
        assert f"tp {verb}: timed out after 0.3 s" in ended.failure.message


def held_up_once_ended(watch: Watch) -> None:
    """Hold this rank up when it is freed from what it waits in, until the group is aborted."""
    call = watchdog.call_watched

    def held_up(*arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException:
            until(lambda: watch.aborted)
            raise

    vars(torch_backend)["call_watched"] = held_up


def one_gives_up(rank: int, n: int, path: str, board: BoardHandle) -> CoordinatorError:
    """Each receives from the other, the first for a moment only."""
    comm = make(rank, n, path, board)
    if rank == 0:
        held_up_once_ended(comm.backend.watch)
    error, _ = failure_of(
        lambda: comm.recv((5,), torch.float32, 1 - rank, timeout=20 if rank else 0.3)
    )
    meet(rank, n, f"{path}.over")
    return error


def test_peers_hear_of_a_deadline_before_the_connections_break(store_path: str) -> None:
    error, told = run_ranks(2, one_gives_up, store_path, NEW_BOARD)
    assert isinstance(error, GroupTimeoutError), error
    assert error.timeout == 0.3
    assert [member.rank for member in error.waiting_for] == [1]
    assert isinstance(told, GroupAbortedError), told
    assert (told.failure.rank, told.failure.kind) == (0, "GroupTimeoutError")


def test_a_deadline_without_a_board_breaks_the_connections(store_path: str) -> None:
    (error, later, seconds), (told, _, _) = run_ranks(
        2, last_is_late, store_path, None, "all_reduce"
    )
    assert isinstance(error, GroupTimeoutError)
    assert isinstance(later, GroupAbortedError)
    assert 0.29 < seconds < SOON
    assert isinstance(told, TransportError)
    assert told.rank == 0


def wait_again(rank: int, n: int, path: str, board: BoardHandle) -> list[float]:
    return wait_twice(make(rank, n, path, board), path)


def test_a_work_can_be_waited_for_again_after_its_deadline(store_path: str) -> None:
    results = run_ranks(2, wait_again, store_path, NEW_BOARD)
    assert results == [[2, 2, 3, 3, 2, 2], [2, 2, 2, 2]]


def wait_for_one_that_left(came: threading.Event) -> None:
    with Board.create(2, 0) as board:
        Board.attach(board.handle(), 1).close()
        boundary = ErrorTranslator(board)
        boundary.wait(came.is_set, Deadline.after(3 * SOON), "recv", [1], poll=0.01)


def test_what_a_peer_sent_before_it_left_may_come_late() -> None:
    came = threading.Event()
    threading.Timer(1.0, came.set).start()
    wait_for_one_that_left(came)
    assert came.is_set()


def test_a_peer_that_left_without_sending_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"recv: rank 1 \(pid \d+\) has closed the group, "):
        wait_for_one_that_left(threading.Event())
    assert time.monotonic() - began < 2 * SOON


def wrong_on_one(rank: int, n: int, path: str, board: BoardHandle) -> str:
    comm = make(rank, n, path, board)
    x = torch.ones(4)
    if rank == 1:
        with pytest.raises(ValueError, match="src=2"):
            comm.broadcast(x, src=2)
        return "raised"
    error = failure_of(lambda: comm.broadcast(x, src=1, timeout=0.5))[0]
    assert isinstance(error, GroupTimeoutError)
    return str(error)


def test_a_wrong_argument_on_one_rank_is_blamed_on_it(store_path: str) -> None:
    said, other = run_ranks(2, wrong_on_one, store_path, NEW_BOARD)
    assert other == "raised"
    assert "waiting for rank 1" in said
    assert "last seen in tp barrier" in said


def closed(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with make(rank, n, path, board) as comm:
        assert "open" in repr(comm)
    comm.close()
    assert comm.closed
    assert "closed" in repr(comm)
    with pytest.raises(GroupClosedError):
        comm.all_reduce(torch.ones(1))


def test_close_twice(store_path: str) -> None:
    run_ranks(2, closed, store_path, NEW_BOARD)


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
    """Both ways, in the foreground, in the background, and in a series."""
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
    """One rank aborts while the other one receives."""
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


_TIMES_OUT_AND_ENDS = """
import os, sys, time, torch
from device_comm import Communicator, TorchBackend
from shm_broadcast import GroupTimeoutError
from tests.ranks import init_gloo
rank, path = int(sys.argv[1]), sys.argv[2]
comm = Communicator(TorchBackend(init_gloo(rank, 2, path, timeout=60), timeout=0.2))
if rank == 1:
    sys.stdin.read()
    os._exit(0)
for call in (lambda: comm.all_reduce(torch.ones(1)), lambda: comm.recv((1,), torch.float32)):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
"""


def test_what_hangs_does_not_hold_up_the_end_of_the_process(store_path: str) -> None:
    command = [sys.executable, "-c", _TIMES_OUT_AND_ENDS]
    with subprocess.Popen([*command, "1", store_path], stdin=subprocess.PIPE) as late:
        ended = run_to_end(*command, "0", store_path, timeout=240)
        late.communicate(timeout=20)
    assert ended.stdout.split() == ["GroupTimeoutError", "GroupAbortedError"]


def give_up(rank: int, n: int, path: str, board: BoardHandle) -> list[int]:
    comm = make(rank, n, path, board)
    kept = []
    for _ in range(3):
        comm.all_reduce(torch.ones(1))
        comm.all_reduce(torch.ones(1), async_op=True).wait()
        kept.append(len(torch_waiting._kept))
    if rank == 0:
        failure_of(lambda: comm.all_reduce(torch.ones(1), timeout=0.2))
        kept.append(len(torch_waiting._kept))
        in_a_child(nothing_is_kept)
    return kept


def nothing_is_kept() -> None:
    assert torch_waiting._kept == set()


def test_torchs_thread_is_not_the_one_that_drops_what_was_given_up(store_path: str) -> None:
    """It would be ended by Python's end, and end the process: see `under_way`."""
    assert run_ranks(2, give_up, store_path, NEW_BOARD) == [[0, 0, 0, 1], [0, 0, 0]]


class Ended:
    """Stands for torch's handle of a collective."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def is_completed(self) -> bool:
        return self.ended


def test_what_has_ended_is_kept_until_others_begin() -> None:
    first, second, third = Ended(ended=True), Ended(ended=False), Ended(ended=False)
    try:
        for work, kept in (first, {first}), (second, {second}), (third, {second, third}):
            torch_waiting.retain_until_done(work)
            assert torch_waiting._kept == kept
    finally:
        for work in (first, second, third):
            torch_waiting.release(work)
    assert torch_waiting._kept == set()
