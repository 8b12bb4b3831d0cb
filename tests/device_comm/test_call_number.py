"""The number of a thread's call, and what ranks begin in it."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, TypeAlias

import pytest
import torch

from device_comm import Communicator, ReduceOp
from device_comm.call_number import (
    CALL_ENTRIES,
    CollectiveLog,
    OperationCounts,
    call_number,
    log_memory,
    set_call_number,
)
from device_comm.shm.signature import sign, with_chunk
from shm_broadcast import BoardHandle, DivergenceError, GroupAbortedError
from tests.calls import in_call
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    Taken: TypeAlias = tuple[bytes, tuple[int, ...]]

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
    begun = OperationCounts(N)
    begun.add(sign("all_reduce"))
    begun.count_sent(1)
    assert begun.take() == (b"", ())
    with in_call(1):
        for verb in ("all_reduce", "barrier", "all_reduce"):
            begun.add(sign(verb))
        begun.count_sent(1)
        begun.count_received(0)
    taken, messages = begun.take()
    log = CollectiveLog(bytearray(taken))
    signatures = [log.signature(number) for number in range(5)]
    assert signatures == [b"", sign("all_reduce"), sign("barrier"), sign("all_reduce"), b""]
    assert (log.count, messages) == (3, (0, 1, 1, 0))
    assert begun.take() == (b"", ())


def test_the_last_collectives_are_kept_in_order() -> None:
    begun = OperationCounts(N)
    signatures = [sign("all_reduce", torch.float32, (n,)) for n in range(20)]
    with in_call(1):
        for signature in signatures:
            begun.add(signature)
    log = CollectiveLog(bytearray(begun.take()[0]))
    kept = [log.signature(n + 1) for n in range(20)]
    assert kept == [b""] * (20 - CALL_ENTRIES) + signatures[20 - CALL_ENTRIES :]


def test_the_checksum_of_two_barriers() -> None:
    """By hand: xor, multiply by the factor, fold the upper half onto the lower one."""
    hashed = 0
    for word in (0xFF00, 0, 0, 0, 0, 0, 0):  # verb 0, no reduction
        product = (hashed ^ word) * 0x9E3779B97F4A7C15 % (1 << 64)
        hashed = product ^ product // (1 << 32)

    def after(digest: int) -> int:
        product = (digest ^ hashed % (1 << 32)) * 0x9E3779B1 % (1 << 32)
        return product ^ product // (1 << 16)

    log = CollectiveLog(log_memory(CALL_ENTRIES))
    assert [log.add(sign("barrier")) for _ in range(2)] == [after(0), after(after(0))]
    assert [log.digest(n) for n in range(4)] == [0, after(0), after(after(0)), None]
    assert log.digest(-1) is None
    with pytest.raises(ValueError, match="length"):
        log.add(b"barrier")


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


def _begun(rank: int, _n: int, handle: BoardHandle, path: str, fast: bool) -> Taken:
    with make_comm(rank, handle, path, fast_path=fast) as comm:
        _verbs(comm)
        assert comm.begun.take() == (b"", ())
        with in_call(5):
            _verbs(comm)
        return comm.begun.take()


def test_every_collective_counts_once_each_way(tmp_path: Path) -> None:
    """The fast path and the slow path make the same fingerprint."""
    expected = OperationCounts(N)
    shape, dtype = (4,), torch.float32
    with in_call(5):
        expected.add(sign("all_reduce", dtype, shape, ReduceOp.SUM))
        expected.add(sign("all_reduce", dtype, shape, ReduceOp.MAX))
        expected.add(sign("all_gather", dtype, shape))
        expected.add(sign("reduce_scatter", dtype, shape, ReduceOp.SUM))
        expected.add(sign("all_to_all", dtype, shape))
        expected.add(sign("broadcast", dtype, shape, None, 1))
        expected.add(sign("reduce", dtype, shape, ReduceOp.SUM, 1))
        expected.add(sign("gather", dtype, shape, None, 0))
        expected.add(sign("scatter", dtype, (2,), None, 0))
        sizes = zlib.crc32(b"[4, 4]"), zlib.crc32(b"[1, 3]")
        expected.add(with_chunk(sign("all_gatherv", dtype, (-1,)), sizes[0]))
        expected.add(with_chunk(sign("reduce_scatterv", dtype, (-1,), ReduceOp.SUM), sizes[1]))
        expected.add(sign("barrier"))
    wanted = expected.take()
    for fast in (True, False):
        path = str(tmp_path / f"comm {fast}")
        assert run_ranks(N, _begun, NEW_BOARD, path, fast) == [wanted, wanted]


def _uneven(comm: Communicator) -> None:
    """All that ranks may give differently, or in another form, or know only in part."""
    x, rank = torch.ones(2 + comm.rank, 3), comm.rank
    comm.all_gatherv(x, sizes=[2, 3])
    comm.all_gatherv([x, x.to(torch.int32)], sizes=[2, 3])
    comm.all_gatherv([])
    comm.reduce_scatterv(torch.ones(5), dim=0, sizes=[2, 3])
    gives, takes = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
    comm.all_to_all(torch.ones(sum(gives)), input_sizes=gives, output_sizes=takes)
    strided = torch.ones(3, 4).t() if rank else torch.ones(4, 3)
    comm.all_reduce(strided)
    comm.all_gather(strided, dim=rank - 2 if rank == 0 else 0)
    comm.all_reduce(torch.ones(()), async_op=bool(rank)).wait() if rank else comm.all_reduce(
        torch.ones(())
    )
    comm.broadcast_(torch.ones(4), src=1)
    comm.reduce_(torch.ones(4), dst=0)
    comm.gather_(torch.ones(4 if rank == 0 else 2), dst=0)
    comm.scatter_(torch.ones(4 if rank == 0 else 2), src=0)
    comm.all_reduce(torch.ones(1, 1, 1, 2, 2, 2, 2))
    comm.all_reduce(torch.ones(0, 3))


def _begun_unevenly(
    rank: int, _n: int, handle: BoardHandle, path: str, fast: tuple[bool, bool]
) -> Taken:
    with make_comm(rank, handle, path, fast_path=fast[rank]) as comm, in_call(5):
        _uneven(comm)
        return comm.begun.take()


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, False)])
def test_what_ranks_may_do_differently_differs_in_no_fingerprint(
    tmp_path: Path, fast: tuple[bool, bool]
) -> None:
    one, other = run_ranks(N, _begun_unevenly, NEW_BOARD, str(tmp_path / "comm"), fast)
    assert one == other != (b"", ())


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


def _skip(rank: int, _n: int, handle: BoardHandle, path: str, verb: str, fast: bool) -> str:
    """Rank 1 leaves the operation out of call 3."""
    with make_comm(rank, handle, path, fast_path=fast) as comm:
        try:
            for number in range(1, 7):
                if (rank, number) != (1, 3):
                    with in_call(number):
                        _one(comm, verb)
            comm.flush()
        except (DivergenceError, GroupAbortedError) as error:
            return str(error)
    return "went on"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("verb", VERBS_OF_PAIRS)
def test_ranks_in_different_calls_do_not_meet(tmp_path: Path, verb: str, fast: bool) -> None:
    told = run_ranks(N, _skip, NEW_BOARD, str(tmp_path / "comm"), verb, fast)
    blamed = told[1] if verb == "recv" else told[0]
    assert "in call 3" in blamed
    assert "in call 4" in blamed
