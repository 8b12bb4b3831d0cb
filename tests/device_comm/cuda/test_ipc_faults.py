"""What survivors see of ranks that die, come late, abort, or cannot be reached."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm.cuda.driver import IpcUnavailableError
from shm_broadcast import (
    BoardHandle,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import make_ipc
from tests.device_comm.meeting import SOON, meet, wait_for_abort
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Communicator

BIG = 300_000
"""Numbers that go in many chunks."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def use(comm: Communicator, verb: str) -> None:
    """Go on for ever with rank 0's peers; one message is waited for in vain."""
    x = torch.ones(BIG)
    while True:
        if verb == "all_reduce":
            comm.all_reduce(x)
        elif verb == "barrier":
            comm.barrier()
        else:
            comm.recv((1,), torch.float32, comm.world_size - 1)


def lose_a_rank(rank: int, n: int, library: str, path: str, board: BoardHandle, verb: str) -> str:
    comm = make_ipc(rank, n, library, path, board)
    if rank == n - 1:
        threading.Timer(0.3, die).start()
        if verb == "recv":
            time.sleep(10)
        use(comm, verb)
    with pytest.raises((PeerLostError, GroupAbortedError)) as caught:
        use(comm, verb)
    with pytest.raises(GroupAbortedError, match=f"rank {n - 1}"):
        comm.barrier()
    comm.close()
    return f"{caught.value}"


@pytest.mark.parametrize(
    ("n", "verb"), [(2, "all_reduce"), (4, "all_reduce"), (4, "barrier"), (2, "recv")]
)
def test_a_rank_that_dies_in_mid_collective_is_named(
    n: int, verb: str, emulation_library: str, store_path: str
) -> None:
    errors = run_ranks(
        n,
        lose_a_rank,
        str(emulation_library),
        store_path,
        NEW_BOARD,
        verb,
        may_die={n - 1},
    )
    assert any(f"lost rank {n - 1}" in error for error in errors[:-1])
    assert all(f"rank {n - 1}" in error for error in errors[:-1])


def be_late(rank: int, n: int, library: str, path: str, board: BoardHandle) -> str:
    comm = make_ipc(rank, n, library, path, board)
    x = torch.ones(BIG)
    comm.all_reduce(x)
    meet(rank, n, path)
    if rank == 1:
        wait_for_abort(comm.watch)
        with pytest.raises(GroupAbortedError) as aborted:
            comm.all_reduce(x)
        comm.close()
        return str(aborted.value)
    began = time.monotonic()
    with pytest.raises((GroupTimeoutError, GroupAbortedError)) as caught:
        comm.all_reduce(x, timeout=3)  # so long that rank 1 alone is late
    assert 2.9 < time.monotonic() - began < 3 + SOON
    comm.close()
    return f"{type(caught.value).__name__} {caught.value}"


def test_a_rank_that_comes_late_is_named(emulation_library: str, store_path: str) -> None:
    errors = run_ranks(3, be_late, str(emulation_library), store_path, NEW_BOARD)
    assert all("rank 1" in error for error in errors)
    first = next(error for error in errors if error.startswith("GroupTimeoutError"))
    assert re.search(r"timed out after 3 s, waiting for rank 1 \(pid \d+\), last seen in", first)
    assert "waited for rank 1 to begin a collective" in first


def abort_others(rank: int, n: int, library: str, path: str, board: BoardHandle) -> str:
    comm = make_ipc(rank, n, library, path, board)
    meet(rank, n, path)
    if rank == 1:
        time.sleep(0.3)
        comm.abort("enough")
        comm.close()
        return ""
    began = time.monotonic()
    with pytest.raises(GroupAbortedError, match="enough") as caught:
        comm.all_reduce(torch.ones(BIG))
    assert time.monotonic() - began < SOON
    comm.close()
    with pytest.raises(GroupClosedError):
        comm.barrier()
    return str(caught.value)


def test_an_abort_reaches_kernels_that_wait(emulation_library: str, store_path: str) -> None:
    errors = run_ranks(3, abort_others, str(emulation_library), store_path, NEW_BOARD)
    assert all("rank 1 reported" in error for error in (errors[0], errors[2]))


def refuse(rank: int, n: int, library: str, path: str, board: BoardHandle, how: str) -> str:
    driver = HostDriver(library)
    driver.refuse_to_pin = how == "pin" and rank == 1
    driver.refuse_to_map = how == "map" and rank == 1
    driver.drop_writes = how == "drop" and rank == 1
    limits = replace(LIMITS, max_blocks=1) if how == "terms" and rank == 2 else LIMITS
    with pytest.raises(IpcUnavailableError) as caught:
        make_ipc(rank, n, library, path, board, driver, limits=limits, probe_seconds=0.5)
    assert not driver.held
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("pin", "rank 1 cannot use .* no more memory to pin"),
        ("map", "rank 1 cannot use .* no way to the peer's device"),
        ("drop", "probe: timed out after 0.5 s, waiting for rank"),
        ("terms", "rank 0 cannot use .* ranks differ"),
    ],
)
def test_all_ranks_refuse_together(
    how: str, reason: str, emulation_library: str, store_path: str
) -> None:
    errors = run_ranks(3, refuse, str(emulation_library), store_path, NEW_BOARD, how)
    assert len(set(errors)) == 1
    assert re.search(reason, errors[0])
