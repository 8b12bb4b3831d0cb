"""The number of a thread's call, and what ranks begin in it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Communicator, ReduceOp
from device_comm.begun import VERBS, Begun, counts_of
from device_comm.call_number import call_number, set_call_number
from shm_broadcast import BoardHandle, DivergenceError, GroupAbortedError
from tests.calls import in_call
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

N = 2


def test_every_thread_has_a_call_of_its_own() -> None:
    seen: list[int] = []
    with in_call(7):
        assert call_number() == 7
        thread = threading.Thread(target=lambda: seen.append(call_number()))
        thread.start()
        thread.join()
    assert seen == [0]
    assert call_number() == 0


def test_numbers_have_32_bits() -> None:
    with in_call((1 << 32) + 5):
        assert call_number() == 5
    with pytest.raises(TypeError):
        set_call_number("one")


def test_what_is_begun_outside_of_calls_does_not_count() -> None:
    begun = Begun(N)
    begun.count("all_reduce")
    begun.count_sent(1)
    assert begun.take() == b""
    with in_call(1):
        for verb in ("all_reduce", "barrier", "all_reduce", "send"):
            begun.count(verb)
        begun.count_sent(1)
        begun.count_received(0)
    collectives, sent, received = counts_of(begun.take(), N)
    assert {v: n for v, n in zip(VERBS, collectives, strict=True) if n} == {
        "barrier": 1,
        "all_reduce": 2,
    }
    assert (sent, received) == ([0, 1], [1, 0])
    assert begun.take() == b""


def _verbs(comm: Communicator) -> None:
    x = torch.ones(4)
    comm.all_reduce(x)
    comm.all_reduce(x, op=ReduceOp.MAX, async_op=True).wait()
    comm.all_gather(x)
    comm.reduce_scatter(x)
    comm.all_to_all(x)
    comm.broadcast(x, src=1)
    comm.reduce(x, dst=1)
    comm.gather(x, dst=0)
    comm.scatter(x if comm.rank == 0 else None, src=0, out=torch.ones(2))
    comm.all_gatherv(x, sizes=[4, 4])
    comm.reduce_scatterv(x, dim=0, sizes=[1, 3])
    comm.barrier()


def _count(rank: int, _n: int, handle: BoardHandle, path: str, use_native: bool) -> list[int]:
    with make_comm(rank, handle, path, use_native=use_native) as comm:
        _verbs(comm)
        assert comm.begun.take() == b""
        with in_call(5):
            _verbs(comm)
        return counts_of(comm.begun.take(), N)[0]


@pytest.mark.parametrize("use_native", [True, False])
def test_every_collective_counts_once_each_way(tmp_path: Path, use_native: bool) -> None:
    expected = [2 if verb == "all_reduce" else 1 for verb in VERBS]
    counted = run_ranks(N, _count, NEW_BOARD, str(tmp_path / "comm"), use_native)
    assert counted == [expected, expected]


VERBS_OF_PAIRS = ("all_reduce", "broadcast", "recv", "barrier")


def _one(comm: Communicator, verb: str) -> object:
    x = torch.full((4,), 1.0 + comm.rank)
    if verb == "recv":
        if comm.rank == 0:
            return comm.send(x, 1)
        return comm.recv(out=torch.zeros(4), src=0)
    if verb == "barrier":
        return comm.barrier()
    return getattr(comm, verb)(x)


def _skip(rank: int, _n: int, handle: BoardHandle, path: str, verb: str, use_native: bool) -> str:
    """Rank 1 leaves the operation out of call 3."""
    with make_comm(rank, handle, path, use_native=use_native) as comm:
        try:
            for number in range(1, 7):
                if (rank, number) != (1, 3):
                    with in_call(number):
                        _one(comm, verb)
            comm.flush()
        except (DivergenceError, GroupAbortedError) as error:
            return str(error)
    return "went on"


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("verb", VERBS_OF_PAIRS)
def test_ranks_in_different_calls_do_not_meet(tmp_path: Path, verb: str, use_native: bool) -> None:
    told = run_ranks(N, _skip, NEW_BOARD, str(tmp_path / "comm"), verb, use_native)
    blamed = told[1] if verb == "recv" else told[0]
    assert "in call 3" in blamed
    assert "in call 4" in blamed
