"""What ranks write down of their operations: all verbs, by the short way and by the long one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Backend, Capabilities, Communicator, Identity
from device_comm.call_number import VERBS
from device_comm.operation import ALL_VERBS
from device_comm.shm.signature import DTYPE_CODES
from shm_broadcast import (
    Board,
    BoardHandle,
    DivergenceError,
    GroupAbortedError,
    GroupTimeoutError,
    PeerLostError,
    layout,
)
from tests.device_comm.shm_ranks import make_comm
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from pathlib import Path

    from device_comm import Operation
    from shm_broadcast.state.flight_recorder import OperationRecord

N = 2
FLOATS = 6
BYTES = 4 * FLOATS


def test_the_codes_are_those_of_the_extension() -> None:
    assert layout.DID_NAMES[1 : 1 + len(VERBS)] == VERBS
    assert layout.DID_NAMES[1 + len(VERBS) : 3 + len(VERBS)] == ("send", "recv")
    assert set(layout.DID_NAMES) >= ALL_VERBS
    assert DTYPE_CODES[torch.float32] == layout.DTYPE_NAMES.index("float32") == 3


def every_verb(rank: int, comm: Communicator) -> None:
    """Each verb that the short way has, twice: it takes transfers only when there is a pipe."""
    x, one = torch.ones(FLOATS), torch.ones(3)
    for _ in range(2):
        comm.all_reduce_(x)
        comm.all_gather(x)
        comm.reduce_scatter(x)
        comm.all_to_all(x)
        comm.broadcast_(x, src=1)
        comm.reduce(x, dst=1)
        comm.gather(x, dst=1)
        comm.scatter(x if rank == 1 else None, src=1, out=None if rank == 1 else one)
        comm.barrier()
        comm.send(x, 1) if rank == 0 else comm.recv(out=x, src=0)
        comm.recv(out=one, src=1) if rank == 0 else comm.send(one, 0)


EXPECTED = [
    ("all_reduce", BYTES, None),
    ("all_gather", BYTES, None),
    ("reduce_scatter", BYTES, None),
    ("all_to_all", BYTES, None),
    ("broadcast", BYTES, 1),
    ("reduce", BYTES, 1),
    ("gather", BYTES, 1),
    ("scatter", (12, BYTES), 1),
    ("barrier", 0, None),
    (("send", "recv"), BYTES, (1, 0)),
    (("recv", "send"), 12, (1, 0)),
]


def call_every_verb(rank: int, n: int, board: BoardHandle, path: str, fast: list[bool]) -> None:
    with make_comm(rank, board, path, fast_path=fast[rank]) as comm:
        every_verb(rank, comm)


@pytest.mark.parametrize("fast", [[True, True], [False, False], [True, False]])
def test_every_verb_is_written_down(fast: list[bool], tmp_path: Path) -> None:
    with Board.create(N, None) as board:
        run_ranks(N, call_every_verb, board.handle(), str(tmp_path / "group"), fast)
        for rank in range(N):
            past = board.recorded(rank)
            assert len(past) == 2 * len(EXPECTED)
            for each, wanted in zip(past, EXPECTED * 2, strict=True):
                verb, size, peer = (w[rank] if isinstance(w, tuple) else w for w in wanted)
                assert (each.verb, each.size, each.peer) == (verb, size, peer)
                assert (each.group, each.outcome) == ("tp", "done")
                assert each.dtype == ("" if verb == "barrier" else "float32")
                assert each.end is not None
                assert each.begin <= each.end
            collectives = [each for each in past if each.verb not in ("send", "recv")]
            assert [each.number for each in collectives] == [*range(1, 19)]
            transfers = [each.number for each in past if each.verb in ("send", "recv")]
            assert transfers == [1, 1, 2, 2]
            ends = [each.end for each in past]
            assert ends == sorted(ends, key=lambda end: end or 0)
        mine, theirs = board.recorded(0), board.recorded(1)
        assert len(overlapping(mine, theirs)) == len(overlapping(theirs, mine)) == 2


def overlapping(
    mine: tuple[OperationRecord, ...], theirs: tuple[OperationRecord, ...]
) -> list[OperationRecord]:
    """My all-reduces that overlap in time with the other rank's of the same number."""
    other = {each.number: each for each in theirs if each.verb == "all_reduce"}
    return [
        each
        for each in mine
        if each.verb == "all_reduce"
        and each.begin <= (other[each.number].end or 0)
        and other[each.number].begin <= (each.end or 0)
    ]


def reduce_often(rank: int, n: int, board: BoardHandle, path: str, times: int) -> None:
    with make_comm(rank, board, path) as comm:
        x = torch.ones(256)
        for _ in range(times):
            comm.all_reduce_(x)


def test_the_same_all_reduce_of_two_ranks_overlaps(tmp_path: Path) -> None:
    """Also those whose end is taken from the time stamp counter."""
    times = 60_000
    with Board.create(N, None) as board:
        run_ranks(N, reduce_often, board.handle(), str(tmp_path / "group"), times)
        mine, theirs = board.recorded(0), board.recorded(1)
        kept = layout.HISTORY_ENTRIES - 1
        assert [each.number for each in mine] == [*range(times - kept + 1, times + 1)]
        assert len(overlapping(mine, theirs)) == len(overlapping(theirs, mine)) == kept
        for past in (mine, theirs):
            for each in past:
                assert each.begin <= (each.end or 0)


def go_on_by_itself(rank: int, n: int, board: BoardHandle, path: str) -> None:
    with make_comm(rank, board, path) as comm:
        x = torch.ones(FLOATS)
        works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
        works[2].wait()
        if rank == 0:
            comm.isend(x, 1)
        else:
            comm.recv(FLOATS, torch.float32, 0)
        comm.all_reduce(torch.ones(0))
        comm.barrier()


def test_what_goes_on_in_the_background_ends_there(tmp_path: Path) -> None:
    """Nobody waits for the first two, nor for the send."""
    with Board.create(N, None) as board:
        run_ranks(N, go_on_by_itself, board.handle(), str(tmp_path / "group"))
        for rank in range(N):
            past = board.recorded(rank)
            verbs = [*["all_reduce"] * 3, ("send", "recv")[rank], "all_reduce", "barrier"]
            assert [each.verb for each in past] == verbs
            assert {each.outcome for each in past} == {"done"}
            numbers = [each.number for each in past if each.verb != ("send", "recv")[rank]]
            assert numbers == [1, 2, 3, 4, 5]


def fail(rank: int, n: int, board: BoardHandle, path: str, how: str, fast: bool) -> None:
    with make_comm(rank, board, path, fast_path=fast) as comm:
        x = torch.ones(FLOATS)
        comm.all_reduce_(x)
        match how:
            case "late":
                if rank == 0:
                    with pytest.raises(GroupTimeoutError):
                        comm.all_reduce_(x, timeout=0.1)
                else:
                    until(lambda: comm.watch.aborted)
            case "divergent":
                with pytest.raises((DivergenceError, GroupAbortedError)):
                    comm.all_reduce_(x) if rank else comm.all_gather(x)
            case "lost":
                if rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                with pytest.raises(PeerLostError):
                    comm.all_reduce_(x)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("how", "outcomes"),
    [
        ("late", ("timed out", None)),
        ("divergent", ("diverged", "diverged")),
        ("lost", ("peer lost", None)),
    ],
)
def test_what_fails_says_how(
    how: str, outcomes: tuple[str | None, ...], fast: bool, tmp_path: Path
) -> None:
    with Board.create(N, None) as board:
        run_ranks(N, fail, board.handle(), str(tmp_path / "group"), how, fast, may_die=[1])
        for rank, outcome in enumerate(outcomes):
            past = board.recorded(rank)
            assert past[0].outcome == "done"
            assert [each.outcome for each in past[1:]] == ([outcome] if outcome else [])


def wait_for_ever(rank: int, n: int, board: BoardHandle, path: str, fast: bool) -> None:
    with make_comm(rank, board, path, timeout=None, fast_path=fast) as comm:
        x = torch.ones(FLOATS)
        comm.all_reduce_(x)
        if rank == 0:
            with suppress(PeerLostError):
                comm.recv(1, torch.float32, 1)
        else:
            comm.all_reduce_(x)


@pytest.mark.parametrize("fast", [True, False])
def test_the_parent_reads_what_a_killed_rank_was_in(fast: bool, tmp_path: Path) -> None:
    with Board.create(N, None) as board:
        args = board.handle(), str(tmp_path / "group"), fast
        ranks = Running(lambda: run_ranks(N, wait_for_ever, *args, may_die=[1]))
        until(lambda: len(board.recorded(1)) == 2)
        os.kill(board.member_status(1).pid, signal.SIGKILL)
        ranks.result()
        first, last = board.recorded(1)
        assert (first.verb, first.number, first.outcome) == ("all_reduce", 1, "done")
        assert (last.verb, last.number, last.size) == ("all_reduce", 2, BYTES)
        assert (last.end, last.outcome) == (None, "under way")


class Broken(Backend):
    """Rank 0 of two, whose operations raise."""

    def __init__(self, board: Board) -> None:
        super().__init__(
            Identity.of(0, 2, name="tp", watch=board), Capabilities("broken", ALL_VERBS)
        )

    def start(self, operation: Operation) -> None:
        del operation
        raise KeyboardInterrupt


def test_an_interrupted_operation_has_failed() -> None:
    with Board.create(2, 0) as board:
        with pytest.raises(KeyboardInterrupt):
            Communicator(Broken(board)).all_reduce(torch.ones(3))
        (past,) = board.recorded(0)
        assert (past.verb, past.outcome) == ("all_reduce", "failed")
