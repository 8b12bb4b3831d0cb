"""The flight recorder of operations, its clock, and the ranges of a profiler."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

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
from tests.device_comm.cuda.fakes import COMPILER, compile_library
from tests.device_comm.shm_ranks import make_comm
from tests.pages.blocks import block_of
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from collections.abc import Callable

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


def call_every_verb(rank: int, n: int, board: BoardHandle, path: str, fast: list[bool]) -> None:
    """Each verb of the fast path, twice: it takes transfers only when there is a pipe."""
    x, one = torch.ones(FLOATS), torch.ones(3)
    with make_comm(rank, board, path, fast_path=fast[rank]) as comm:
        for _ in range(2):
            comm.all_reduce_(x)
            for verb in (comm.all_gather, comm.reduce_scatter, comm.all_to_all):
                verb(x)
            comm.broadcast_(x, src=1)
            comm.reduce(x, dst=1)
            comm.gather(x, dst=1)
            comm.scatter(x if rank == 1 else None, src=1, out=None if rank == 1 else one)
            comm.barrier()
            comm.send(x, 1) if rank == 0 else comm.recv(out=x, src=0)
            comm.recv(out=one, src=1) if rank == 0 else comm.send(one, 0)


EXPECTED = [
    *((verb, BYTES, None) for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    *((verb, BYTES, 1) for verb in ("broadcast", "reduce", "gather")),
    ("scatter", (12, BYTES), 1),
    ("barrier", 0, None),
    (("send", "recv"), BYTES, (1, 0)),
    (("recv", "send"), 12, (1, 0)),
]


@pytest.mark.parametrize("fast", [[True, True], [False, False]])
def test_every_verb_is_recorded(fast: list[bool], tmp_path: Path) -> None:
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
    times = 10_000
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
    begun = Path(f"{path}-begun")
    with make_comm(rank, board, path) as comm:
        x = torch.ones(FLOATS)
        if rank == 1:
            until(begun.exists)  # so rank 0's go on in the background
        works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
        begun.touch()
        works[2].wait()
        if rank == 0:
            comm.isend(x, 1)
        else:
            comm.recv(FLOATS, torch.float32, 0)
        comm.all_reduce(torch.ones(0))
        comm.barrier()


def test_background_operations_are_recorded_until_they_end(tmp_path: Path) -> None:
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


OUTCOMES: dict[str, tuple[str | None, ...]] = {
    "late": ("timed out", None),
    "divergent": ("diverged", "diverged"),
    "lost": ("peer lost", None),
}


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
@pytest.mark.parametrize("how", OUTCOMES)
def test_a_failed_operation_has_its_outcome(how: str, fast: bool, tmp_path: Path) -> None:
    with Board.create(N, None) as board:
        run_ranks(N, fail, board.handle(), str(tmp_path / "group"), how, fast, may_die=[1])
        for rank, outcome in enumerate(OUTCOMES[how]):
            past = board.recorded(rank)
            assert past[0].outcome == "done"
            assert [each.outcome for each in past[1:]] == ([outcome] if outcome else [])


def wait_for_ever(rank: int, n: int, board: BoardHandle, path: str) -> None:
    with make_comm(rank, board, path, timeout=None) as comm:
        x = torch.ones(FLOATS)
        comm.all_reduce_(x)
        if rank == 0:
            with suppress(PeerLostError):
                comm.recv(1, torch.float32, 1)
        else:
            comm.all_reduce_(x)


def test_the_parent_reads_what_a_killed_rank_was_in(tmp_path: Path) -> None:
    with Board.create(N, None) as board:
        args = board.handle(), str(tmp_path / "group")
        ranks = Running(lambda: run_ranks(N, wait_for_ever, *args, may_die=[1]))
        until(lambda: len(board.recorded(1)) == 2)
        os.kill(board.member_status(1).pid, signal.SIGKILL)
        ranks.result()
        first, last = board.recorded(1)
        assert (first.verb, first.number, first.outcome) == ("all_reduce", 1, "done")
        assert (last.verb, last.number, last.size) == ("all_reduce", 2, BYTES)
        assert (last.end, last.outcome) == (None, "under way")


class Broken(Backend):
    def start(self, operation: Operation) -> None:
        del operation
        raise KeyboardInterrupt


def test_an_interrupted_operation_has_failed() -> None:
    with Board.create(2, 0) as board:
        identity = Identity.of(0, 2, name="tp", watch=board)
        with pytest.raises(KeyboardInterrupt):
            Communicator(Broken(identity, Capabilities("broken", ALL_VERBS))).all_reduce(
                torch.ones(3)
            )
        (past,) = board.recorded(0)
        assert (past.verb, past.outcome) == ("all_reduce", "failed")


# --- Ranges of a profiler ------------------------------------------------------------------------


def use(comm: Communicator) -> list[torch.Tensor]:
    x = torch.arange(1024.0) + comm.rank
    reduced = [comm.all_reduce(x), comm.all_reduce_(x.clone()), comm.all_reduce(x.view(32, 32).T)]
    begun = comm.all_gather(x, async_op=True)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        reduced.append(comm.recv(1024, torch.float32, 0))
    comm.barrier()
    return [*reduced, begun.wait()]


def profiled(rank: int, n: int, board: BoardHandle, path: str) -> dict[str, int]:
    with make_comm(rank, board, path) as comm:
        plain = use(comm)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            shown = use(comm)
        assert all(torch.equal(a, b) for a, b in zip(plain, shown, strict=True))
        again = use(comm)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    counts = {each.key: each.count for each in recorded.key_averages()}
    return {key: count for key, count in counts.items() if key.startswith("group-coordinator")}


def test_each_operation_is_a_range(tmp_path: Path) -> None:
    documented = {*block_of("docs/debugging.md", "group-coordinator all_reduce tp").splitlines()}
    with Board.create(N, None) as board:
        counts = run_ranks(N, profiled, board.handle(), str(tmp_path / "group"))
        for rank, ranges in enumerate(counts):
            assert ranges == {
                "group-coordinator all_reduce tp 4096 B": 3,
                "group-coordinator all_gather tp 4096 B": 1,
                f"group-coordinator {('send', 'recv')[rank]} tp 4096 B": 1,
                "group-coordinator barrier tp 0 B": 1,
            }
            assert documented <= ranges.keys()
            past = board.recorded(rank)
            assert len(past) == 3 * 6
            assert {each.outcome for each in past} == {"done"}


# --- The clock that reads the processor's counter, with both of them made up ---------------------

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "atomics.h"
static uint64_t the_ns, the_ticks, slow;
static uint64_t read_clock(void) {
    uint64_t now = the_ns;
    uint64_t ticks = slow;
    slow = ticks ? 40 : 0;
    the_ticks += ticks;
    the_ns += ticks / 2;
    return now;
}
#define gc_now_ns() read_clock()
#define __builtin_ia32_rdtsc() the_ticks
#include "pace.h"
static gc_pace pace;
uint64_t read_pace(uint64_t ns, uint64_t ticks, uint64_t first) {
    the_ns = ns;
    the_ticks = ticks;
    slow = first;
    return gc_pace_now(&pace);
}
"""
SECOND, MS = 1_000_000_000, 1_000_000
HOUR = 3600 * SECOND


@pytest.fixture
def read(tmp_path: Path) -> Callable[[int, int, int], int]:
    """Reads the clock at a time in ns and in ticks; its first reading takes some ticks more."""
    if COMPILER is None or platform.machine() != "x86_64":
        pytest.skip("no C compiler, or no such counter")
    source = tmp_path / "pace.c"
    source.write_text(SOURCE)
    headers = [f"-I{ROOT / floor / 'native'}" for floor in ("shm_broadcast", "device_comm")]
    path = compile_library(source, tmp_path / "pace.so", "-std=gnu11", "-D_GNU_SOURCE", *headers)
    function = ctypes.CDLL(path).read_pace
    function.argtypes, function.restype = [ctypes.c_uint64] * 3, ctypes.c_uint64
    return cast("Callable[[int, int, int], int]", function)


@pytest.mark.parametrize("jump", [HOUR, 6 * SECOND, -HOUR])
def test_the_clock_goes_on_when_its_counter_jumps(
    jump: int, read: Callable[[int, int, int], int]
) -> None:
    """As when a virtual machine was suspended."""
    begin, ticks = 5 * SECOND, 10 * HOUR
    for after in range(0, 100 * MS, MS // 2):
        jumped = jump if after >= 45 * MS else 0
        now = read(begin + after, ticks + 2 * after + jumped, 0)
        assert abs(now - begin - after) <= MS


@pytest.mark.parametrize("slow", [60, 900, 1500])
def test_a_slow_reading_does_not_shift_the_clock(
    slow: int, read: Callable[[int, int, int], int]
) -> None:
    """As behind a switch of processes, when nothing of the clock is in the caches."""
    begin, ticks = 5 * SECOND, 10 * HOUR
    steps = range(0, 100 * MS, MS // 5)
    off = [read(begin + after, ticks + 2 * after, slow) - begin - after for after in steps]
    # Half of what each further reading takes: 40 ticks of half a ns.
    assert min(off) >= -10
