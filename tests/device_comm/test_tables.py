"""The table of verbs over every backend but those of shared memory and of GPUs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import (
    ALL_VERBS,
    Communicator,
    Identity,
    LoopbackBackend,
    ReduceOp,
    TorchBackend,
    Work,
)
from device_comm.operation import Verb
from device_comm.selection import Candidate, Measured, SelectingBackend, Selection, Table
from device_comm.shm.channel import HEADER_BYTES, RING_BYTES
from device_comm.wrappers import HostStaging
from examples.backend import StoreBackend, rank_main
from shm_broadcast import (
    Board,
    BoardHandle,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from tests.device_comm.cases import move_cases, reduce_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.meeting import meet
from tests.device_comm.shm_ranks import make_comm, on_ranks
from tests.device_comm.suite import check_table, run_whole_table
from tests.patience import until
from tests.ranks import NEW_BOARD, init_gloo, run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


# --- Backends of several ranks --------------------------------------------------------------------

BYTES = [32, 100, 300, 5000]
VERBS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"]


def alternating() -> Table:
    winners = ["shm", "gloo", "shm", "gloo"]
    rows = [
        Measured(size, {name: 1.0 if name == winner else 2.0 for name in ("shm", "gloo")})
        for size, winner in zip(BYTES, winners, strict=True)
    ]
    return Table({}, dict.fromkeys([*VERBS, "send"], rows))


def selecting(
    rank: int, n: int, path: str, board: BoardHandle | Board, table: Table | None
) -> tuple[Communicator, Board]:
    watch = board if isinstance(board, Board) else Board.attach(board, rank)
    shm = make_comm(rank, watch, f"{path}-shm")
    gloo = TorchBackend(init_gloo(rank, n, path), "cpu", watch, name="tp", timeout=20)
    candidates = [Candidate("shm", shm.backend), Candidate("gloo", gloo)]
    return Communicator(SelectingBackend(Selection(candidates, table))), watch


def selection_of(comm: Communicator) -> Selection:
    assert isinstance(comm.backend, SelectingBackend)
    return comm.backend.selection


def staged(rank: int, path: str, board: BoardHandle, device: str = "cpu") -> Communicator:
    return Communicator(HostStaging(make_comm(rank, board, path).backend, device))


def make(kind: str, rank: int, n: int, path: str, board: BoardHandle) -> Communicator:
    match kind:
        case "gloo":
            backend = TorchBackend(init_gloo(rank, n, path), "cpu", Board.attach(board, rank))
            return Communicator(backend)
        case "gloo without a board":
            return Communicator(TorchBackend(init_gloo(rank, n, path)))
        case "gloo staged":
            return Communicator(HostStaging(TorchBackend(init_gloo(rank, n, path)), "cpu"))
        case "selecting":
            return selecting(rank, n, path, board, alternating())[0]
        case _:
            return staged(rank, path, board, kind.removeprefix("staged on "))


def table(
    rank: int, n: int, path: str, board: BoardHandle, kind: str, dtypes: list[torch.dtype] | None
) -> dict[str, str]:
    with make(kind, rank, n, path, board) as comm:
        return run_whole_table(comm, dtypes)


COMMON = [torch.float32, torch.int64, torch.bfloat16]
FEW = [torch.float32, torch.bool]
ALL = None


@pytest.mark.parametrize(
    ("kind", "n", "dtypes"),
    [
        ("gloo", 1, FEW),
        ("gloo", 3, None),
        ("gloo", 4, FEW),
        ("gloo without a board", 2, FEW),
        ("gloo staged", 2, [torch.float32]),
        ("selecting", 2, FEW),
        ("selecting", 3, FEW),
        ("staged on cpu", 2, COMMON),
        pytest.param("staged on cuda:0", 2, COMMON, marks=pytest.mark.gpu),
    ],
)
def test_table(kind: str, n: int, dtypes: list[torch.dtype] | None, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD, kind, dtypes))


# --- Selecting among backends ---------------------------------------------------------------------


def both_are_used(rank: int, n: int, path: str, handle: BoardHandle) -> list[str]:
    comm, board = selecting(rank, n, path, handle, alternating())
    used = []
    with comm:
        for size in BYTES:
            x = torch.full((size // 4,), rank + 1.0)
            assert comm.all_reduce(x, op=ReduceOp.SUM).unique().tolist() == [3.0]
            used.append(selection_of(comm).candidate("all_reduce", x.nbytes).name)
        assert comm.capabilities.backend == "shm+gloo"
        assert not comm.capabilities.detects_divergence
        meet(rank, n, path)
        board.abort("enough")
        with pytest.raises(GroupAbortedError, match="tp all_reduce"):
            comm.all_reduce(torch.ones(1))
    with pytest.raises(GroupClosedError):
        comm.barrier()
    return used


def test_both_are_used_and_end_together(store_path: str) -> None:
    found = run_ranks(2, both_are_used, store_path, NEW_BOARD)
    assert found == [["shm", "gloo", "shm", "gloo"]] * 2


# --- Host staging ---------------------------------------------------------------------------------


@on_ranks(2)
def test_staging_sends_as_far_ahead_as_the_host(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    with staged(rank, path, board) as comm:
        assert comm.capabilities.backend == "host"
        assert comm.capabilities.detects_divergence
        peer, x = 1 - rank, torch.ones(1)
        with pytest.raises(NotImplementedError, match="host has no irecv_series"):
            comm.irecv_series(list, peer)
        sent = 0
        while comm.sends_eagerly(peer, x.nbytes):
            comm.send(x, peer)
            sent += 1
        comm.barrier()
        assert sent == RING_BYTES // (2 * HEADER_BYTES)
        for _ in range(sent):
            assert comm.recv((1,), torch.float32, peer) == 1
        comm.barrier()  # who closes before its messages were found takes them along


# --- A group of one ------------------------------------------------------------------------------


def test_table_over_a_group_of_one() -> None:
    with Communicator(LoopbackBackend()) as comm:
        check_table([run_whole_table(comm, [torch.float32, torch.int64, torch.bool])])


def test_the_table_has_rows_for_every_verb() -> None:
    rows = Counter(verb for case in (*reduce_cases(2), *move_cases(2)) for verb in case.verbs)
    assert {verb for verb in ALL_VERBS if rows[verb] < 4} == {"barrier"}
    assert any(case.name == "barrier_waits_for_the_late" for case in named_cases(2))


def test_results_are_the_input_itself() -> None:
    comm, x = Communicator(LoopbackBackend()), torch.ones(2, 2).t()
    for verb in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.gather, comm.scatter):
        assert verb(x) is x
        work = verb(x, async_op=True)
        assert isinstance(work, Work)
        assert work.is_completed()
        assert work.wait() is x
    out = torch.zeros(2, 2)
    assert comm.all_to_all(x, out=out) is out
    assert torch.equal(out, x)


def test_a_group_of_one_checks_outputs() -> None:
    comm, x = Communicator(LoopbackBackend()), torch.ones(3, 2)
    wide = torch.zeros(2).expand(3, 2)
    for verb in (
        *(comm.all_reduce, comm.all_gather, comm.all_gatherv, comm.all_to_all, comm.broadcast),
        *(comm.reduce_scatter, comm.reduce_scatterv, comm.reduce, comm.gather, comm.scatter),
    ):
        for kind, out in [
            (ValueError, torch.zeros(6)),
            (TypeError, x.double()),
            (ValueError, wide),
        ]:
            with pytest.raises(kind, match=r"out has shape|the result is|the output is expanded"):
                verb(x, out=out)
    with pytest.raises(ValueError, match="the output is expanded"):
        comm.all_reduce_(wide)


def test_it_closes_and_aborts_like_any_other() -> None:
    with Board.create(3, 1) as board:
        comm = Communicator(LoopbackBackend(watch=board, member=1, name="dp"))
        assert comm.all_reduce(torch.ones(1)).item() == 1
        assert board.member_status(1).operation == "dp all_reduce"
        assert repr(comm) == "<Communicator 'dp' rank 0 of 1 on cpu, loopback, open>"
        comm.abort("enough")
        assert "aborted" in repr(comm)
        with pytest.raises(GroupAbortedError, match="enough"):
            comm.barrier()
        comm.close()
        comm.close()
        with pytest.raises(GroupClosedError):
            comm.barrier()


# --- The backend of CONTRIBUTING.md ---------------------------------------------------------------

DTYPES = (torch.float32, torch.bool, torch.complex64)
EXAMPLE_VERBS: frozenset[Verb] = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
ERRORS = {"dies": PeerLostError, "aborts": GroupAbortedError, "is late": GroupTimeoutError}


def example_table(rank: int, n: int, store: Store) -> dict[str, str]:
    with Communicator(StoreBackend(store, Identity.of(rank, n))) as comm:
        return run_whole_table(comm, DTYPES, EXAMPLE_VERBS)


def test_table_example() -> None:
    check_table(run_ranks(2, example_table, SharedStore()))


def one_fails(rank: int, n: int, store: Store, board: BoardHandle, fault: str) -> str | None:
    with Board.attach(board, rank) as watch:
        comm = Communicator(StoreBackend(store, Identity.of(rank, n, name="tp", watch=watch)))
        comm.barrier()
        if rank == 0:
            with pytest.raises(ERRORS[fault]) as raised:
                comm.all_reduce(torch.ones(4), timeout=0.5 if fault == "is late" else None)
            comm.close()
            return str(raised.value)
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "aborts":
            comm.abort("no memory")
        until(lambda: watch.aborted is not None)
        comm.close()
    return None


@pytest.mark.parametrize("fault", ERRORS)
def test_the_example_names_a_peer_that(fault: str) -> None:
    text, _ = run_ranks(2, one_fails, SharedStore(), NEW_BOARD, fault, may_die=[1])
    assert "tp all_reduce: " in text
    assert "rank 1" in text


def print_the_sum(rank: int, n: int, path: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        rank_main(rank, n, path)
    return printed.getvalue()


def test_the_program_of_the_example(store_path: str) -> None:
    printed = run_ranks(3, print_the_sum, store_path)
    assert printed == [f"rank {rank}: 6 over store\n" for rank in range(3)]
