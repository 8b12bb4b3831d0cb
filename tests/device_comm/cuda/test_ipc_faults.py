"""What survivors of `IpcBackend` see of ranks that die, come late, abort, or cannot be reached."""

from __future__ import annotations

import re
import struct
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Communicator, Identity
from device_comm.cuda.driver import IpcUnavailableError
from device_comm.cuda.ipc import abi, setup
from device_comm.cuda.ipc.mappings import UnmapFlags
from device_comm.cuda.ipc.setup import KernelWatchdog
from shm_broadcast import (
    Board,
    BoardHandle,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from shm_broadcast.process import ProcessId
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.ipc_ranks import HostDriver, ipc_of, make_ipc, run_local
from tests.device_comm.meeting import SOON, die, meet, wait_for_abort
from tests.patience import until
from tests.shm_broadcast.test_board import bury

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., list[Any]]

BIG = 300_000
"""Numbers that go in many chunks."""


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
        threading.Timer(0.3, die, [path]).start()
        if verb == "recv":
            time.sleep(10)
        use(comm, verb)
    with pytest.raises((PeerLostError, GroupAbortedError)) as caught:
        use(comm, verb)
    with pytest.raises(GroupAbortedError, match=f"rank {n - 1}"):
        comm.barrier()
    comm.close()
    return f"{caught.value}"


@pytest.mark.parametrize(("n", "verb"), [(3, "all_reduce"), (3, "barrier"), (2, "recv")])
def test_a_rank_that_dies_in_mid_collective_is_named(n: int, verb: str, run_ipc: Run) -> None:
    errors = run_ipc(n, lose_a_rank, verb, may_die={n - 1})
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
        comm.all_reduce(x, timeout=2)  # so long that rank 1 alone is late
    assert 1.9 < time.monotonic() - began < 2 + SOON
    comm.close()
    return f"{type(caught.value).__name__} {caught.value}"


def test_a_late_rank_is_named(run_ipc: Run) -> None:
    errors = run_ipc(3, be_late)
    assert all("rank 1" in error for error in errors)
    first = next(error for error in errors if error.startswith("GroupTimeoutError"))
    assert re.search(r"timed out after 2 s, waiting for rank 1 \(pid \d+\), last seen in", first)
    assert "waited for rank 1 to begin a collective" in first


def test_without_a_board_a_deadline_names_the_rank(emulation_library: Path) -> None:
    timed_out = threading.Event()

    def body(comm: Communicator, _: HostDriver) -> None:
        if comm.rank == 1:
            assert timed_out.wait(60)
            return
        with pytest.raises(GroupTimeoutError, match="rank 0 waited for rank 1 to begin") as caught:
            comm.all_reduce(torch.ones(5000), timeout=0.2)
        assert [each.rank for each in caught.value.waiting_for] == [1]
        timed_out.set()

    run_local(emulation_library, 2, body)


def abort_others(rank: int, n: int, library: str, path: str, board: BoardHandle) -> str:
    comm = make_ipc(rank, n, library, path, board)
    meet(rank, n, path)
    if rank == 1:
        status = comm.watch.member_status
        until(lambda: all(status(peer).operation == "tp all_reduce" for peer in (0, 2)))
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


def test_an_abort_reaches_kernels_that_wait(run_ipc: Run) -> None:
    errors = run_ipc(3, abort_others)
    assert all("rank 1 reported" in error for error in (errors[0], errors[2]))


def test_a_dead_rank_is_noticed_after_others_have_closed() -> None:
    control = memoryview(bytearray(abi.CONTROL_BYTES))

    def stopped() -> bool:
        return bool(struct.unpack_from("<I", control, abi.CONTROL_ABORT)[0])

    with Board.create(4, member=0) as board:
        first, second, third = (Board.attach(board.handle(), member) for member in (1, 2, 3))
        health = KernelWatchdog(control, Identity.of(0, 4, name="tp", watch=board))
        for closing in (first, second):
            closing.close()
            board.notify(0)
        assert not stopped()
        bury(board, 3)
        until(stopped)
        health.close()
        third.close()


def refuse(rank: int, n: int, library: str, path: str, board: BoardHandle, how: str) -> str:
    driver = HostDriver(library)
    driver.lacks = how if rank == 1 else ""
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
        ("writes", "probe: timed out after 0.5 s, waiting for rank"),
        ("terms", "rank 0 cannot use .* ranks differ"),
    ],
)
def test_all_ranks_refuse_together(how: str, reason: str, run_ipc: Run) -> None:
    errors = run_ipc(3, refuse, how)
    assert len(set(errors)) == 1
    assert re.search(reason, errors[0])


# --- release -----------------------------------------------------------------------------


def test_messages_can_be_waited_for_after_close(emulation_library: Path) -> None:
    given, taken = torch.arange(5000.0), torch.zeros(5000)

    def body(comm: Communicator, driver: HostDriver) -> None:
        work = comm.isend(given, 1) if comm.rank == 0 else comm.irecv(out=taken, src=0)
        health = ipc_of(comm)._health
        comm.close()
        driver.orders.clear()
        work.wait()
        assert driver.orders == []
        health.abort()  # touches nothing that was freed
        health.check("later", None)

    run_local(emulation_library, 2, body)
    assert torch.equal(given, taken)


def close_apart(
    rank: int, n: int, library: str, path: str, board: BoardHandle
) -> tuple[float, float]:
    """When this rank began to close, and when it had closed."""
    driver = HostDriver(library)
    comm = make_ipc(rank, n, library, path, board, driver)
    comm.all_reduce(torch.ones(5000))
    if rank == 1:
        time.sleep(0.3)
    began = time.monotonic()
    comm.close()
    assert not driver.held
    return began, time.monotonic()


def test_memory_is_freed_once_peers_have_unmapped_it(run_ipc: Run) -> None:
    (_, early), (began, late) = run_ipc(2, close_apart)
    assert early >= began
    assert late - began < SOON


def test_memory_that_a_peer_keeps_is_not_freed(
    emulation_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ENDPOINT_LINGER", 0.1)
    closed = threading.Event()

    def body(comm: Communicator, driver: HostDriver) -> None:
        if comm.rank == 1:
            assert closed.wait(60)
            return
        comm.close()
        assert driver.held == 1
        closed.set()

    run_local(emulation_library, 2, body)


@pytest.mark.quick
def test_peers_have_unmapped_once_they_say_so_or_are_dead() -> None:
    me = ProcessId.current()
    here = UnmapFlags.create(0)
    there = UnmapFlags.attach(here.handle(), 1)
    assert not here.wait([(1, me)], Deadline.after(0.02))
    there.set_unmapped()
    assert here.wait([(1, me)], Deadline.after(0))
    assert not there.wait([(0, me), (1, me)], Deadline.after(0))
    assert there.wait([(0, ProcessId(me.pid, me.start_time + 1))], Deadline.after(0))
    here.close()
    there.close()
