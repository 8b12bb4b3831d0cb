"""Ranks that are threads of one process, and letting go of each other's memory in order."""

from __future__ import annotations

import time

import pytest
import torch

from coordinator.messages.incoming import Communicators
from coordinator.messages.transport import Sender
from device_comm import Communicator
from device_comm.cuda.ipc import setup
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from device_comm.cuda.ipc.mappings import UnmapFlags
from shm_broadcast import Board, BoardHandle, Deadline, GroupTimeoutError
from shm_broadcast.process import ProcessId
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.host_driver import HostDriver, small_layout
from tests.device_comm.cuda.ipc_ranks import ipc_of, local_swaps, make_ipc, on_threads
from tests.device_comm.meeting import SOON
from tests.ranks import NEW_BOARD, run_ranks


def make_local(library: str, n: int, board: Board | None) -> list[Communicator]:
    """One communicator for each of ``n`` threads, on devices of their own."""
    swaps = local_swaps(n)

    def make(rank: int) -> Communicator:
        return Communicator(
            IpcBackend.create(
                HostDriver(library, f"device {rank}"),
                rank,
                n,
                swaps[rank],
                watch=None if board is None else Board.attach(board.handle(), rank),
                timeout=10,
                layout=small_layout(n),
                limits=LIMITS,
            )
        )

    return on_threads(n, make)


@pytest.mark.parametrize("watched", [True, False])
def test_ranks_as_threads(watched: bool, emulation_library: str) -> None:
    n = 3
    with Board.create(n, None) as board:
        comms = make_local(str(emulation_library), n, board if watched else None)

        def body(rank: int) -> None:
            comm = comms[rank]
            driver = ipc_of(comm)._driver
            assert isinstance(driver, HostDriver)
            assert not driver._mapped
            assert len(set(driver.reached)) == n - 1
            for numel in (3, 999, 20_000):
                x = torch.arange(numel, dtype=torch.float32) + rank
                assert torch.equal(comm.all_reduce(x), x * n + n * (n - 1 - 2 * rank) / 2)
            x = driver.tensor((5000,), torch.float32)
            with comm.graph_capture(), driver.capture() as graph:
                total = comm.all_reduce(x)
            for turn in range(3):
                x.fill_(rank + turn)
                graph.replay()
                assert total[-1] == n * turn + 3
            assert ipc_of(comm).reasons == ()
            comm.close()
            if isinstance(comm.watch, Board):
                comm.watch.close()

        on_threads(n, body)


def test_without_a_board_deadlines_name_the_rank(emulation_library: str) -> None:
    comms = make_local(str(emulation_library), 2, None)
    with pytest.raises(GroupTimeoutError, match="rank 0 waited for rank 1 to begin") as caught:
        comms[0].all_reduce(torch.ones(5000), timeout=0.2)
    assert [each.rank for each in caught.value.waiting_for] == [1]
    on_threads(2, lambda rank: comms[rank].close())


def test_what_is_done_can_be_waited_for_when_all_is_closed(emulation_library: str) -> None:
    comms = make_local(str(emulation_library), 2, None)
    given, taken = torch.arange(5000.0), torch.zeros(5000)

    def body(rank: int) -> None:
        comm = comms[rank]
        work = comm.isend(given, 1) if rank == 0 else comm.irecv(out=taken, src=0)
        comm.close()
        driver, health = ipc_of(comm)._driver, ipc_of(comm)._health
        assert isinstance(driver, HostDriver)
        driver.orders.clear()
        work.wait()
        assert driver.orders == []
        health.abort()  # touches nothing that was given back
        health.check("later", None)

    on_threads(2, body)
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


def test_memory_is_freed_once_peers_have_unmapped_it(
    emulation_library: str, store_path: str
) -> None:
    (_, early), (began, late) = run_ranks(
        2, close_apart, str(emulation_library), store_path, NEW_BOARD
    )
    assert early >= began
    assert late - began < SOON


def test_memory_that_a_peer_keeps_is_left(
    emulation_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ENDPOINT_LINGER", 0.1)
    first, second = make_local(str(emulation_library), 2, None)
    first.close()
    driver = ipc_of(first)._driver
    assert isinstance(driver, HostDriver)
    assert driver.held == 1
    second.close()


def test_departures() -> None:
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


class NotingDriver(HostDriver):
    """Notes what a device that ranks share does only when all that runs on it has ended."""

    def __init__(self, library: str, noted: list[str]) -> None:
        super().__init__(library)
        self._noted = noted

    def allocate(self, nbytes: int) -> int:
        self._noted.append("allocate")
        return super().allocate(nbytes)

    def write(self, pointer: int, data: bytes) -> None:
        self._noted.append("write")
        super().write(pointer, data)

    def make_stream(self) -> int:
        self._noted.append("make_stream")
        return super().make_stream()


def test_nothing_is_made_on_the_device_once_a_peer_may_wait_there(emulation_library: str) -> None:
    """All have come to the last swap but one: whoever is quick has launched its probe."""
    n = 2
    swaps = local_swaps(n)

    def make(rank: int) -> list[str]:
        noted: list[str] = []

        def swap(payload: bytes) -> list[bytes]:
            noted.append("swap")
            return swaps[rank](payload)

        driver = NotingDriver(str(emulation_library), noted)
        IpcBackend.create(
            driver, rank, n, swap, timeout=10, layout=small_layout(n), limits=LIMITS
        ).close()
        return noted

    for noted in on_threads(n, make):
        assert noted[-2:] == ["swap", "swap"]
        assert "make_stream" in noted


def cross(rank: int, n: int, library: str, path: str, board: BoardHandle) -> None:
    """Both send first, more than a channel holds, and change what they have sent."""
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver, timeout=60) as comm:
        other, size = 1 - rank, 4 * small_layout(n).channel_bytes
        outgoing = Sender(Communicators(comm, comm), numbered=False)
        x, found = (torch.full((size,), rank, dtype=torch.uint8) for _ in range(2))
        for _ in range(3):
            outgoing.send(None, (x,), other, Deadline.after(60))
        x.fill_(7)
        for _ in range(3):
            assert comm.recv(out=found, src=other).unique().tolist() == [other]
        outgoing.flush(Deadline.after(60))


def test_ranks_that_send_to_each_other_first_both_go_on(
    emulation_library: str, store_path: str
) -> None:
    with Board.create(2, None) as board:
        run_ranks(2, cross, str(emulation_library), store_path, board.handle())
