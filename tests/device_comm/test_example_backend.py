"""The backend of CONTRIBUTING.md: its results, its errors, and its program."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Communicator, Identity
from device_comm.operation import Verb
from examples.backend import StoreBackend
from shm_broadcast import Board, GroupAbortedError, GroupTimeoutError, PeerLostError
from tests.commands import run_to_end
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table
from tests.packages import ROOT
from tests.patience import until
from tests.ranks import NEW_BOARD, run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store

    from shm_broadcast import BoardHandle

DTYPES = (torch.float32, torch.bool, torch.complex64)
VERBS: frozenset[Verb] = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
LIMIT = 0.5
ERRORS = {"dies": PeerLostError, "aborts": GroupAbortedError, "is late": GroupTimeoutError}


def table(rank: int, n: int, store: Store) -> dict[str, str]:
    with Communicator(StoreBackend(store, Identity.of(rank, n))) as comm:
        return run_whole_table(comm, DTYPES, VERBS)


@pytest.mark.parametrize("n", [2, 3])
def test_table(n: int) -> None:
    check_table(run_ranks(n, table, SharedStore()))


def one_fails(rank: int, n: int, store: Store, board: BoardHandle, fault: str) -> str | None:
    with Board.attach(board, rank) as watch:
        identity = Identity.of(rank, n, name="tp", watch=watch)
        with Communicator(StoreBackend(store, identity)) as comm:
            comm.barrier()
            if rank == 0:
                with pytest.raises(ERRORS[fault]) as raised:
                    comm.all_reduce(torch.ones(4), timeout=LIMIT if fault == "is late" else None)
                return str(raised.value)
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "aborts":
                comm.abort("no memory")
            until(lambda: watch.aborted is not None)
    return None


@pytest.mark.parametrize("fault", ERRORS)
def test_a_peer_that(fault: str) -> None:
    text, _ = run_ranks(2, one_fails, SharedStore(), NEW_BOARD, fault, may_die=[1])
    assert "tp all_reduce: " in text
    assert "rank 1" in text


def test_its_program() -> None:
    done = run_to_end(
        *(sys.executable, "examples/backend.py"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert [done.stdout.count(f"rank {rank}: 6 over store") for rank in range(3)] == [1] * 3
