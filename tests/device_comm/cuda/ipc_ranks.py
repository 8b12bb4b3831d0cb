"""How tests make communicators over `IpcBackend`, on a device of host threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from device_comm import Communicator
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.ipc import setup
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from shm_broadcast import Board
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.host_driver import HostDriver, small_layout
from tests.device_comm.shm_ranks import make_comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.cuda.ipc.abi import Limits
    from shm_broadcast import BoardHandle

T = TypeVar("T")


def local_swaps(n: int, timeout: float = 20) -> list[Callable[[bytes], list[bytes]]]:
    """Swaps for ``n`` ranks that are threads of this process."""
    given: list[bytes] = [b""] * n
    meeting = threading.Barrier(n, timeout=timeout)

    def swap_of(rank: int) -> Callable[[bytes], list[bytes]]:
        def swap(payload: bytes) -> list[bytes]:
            given[rank] = payload
            meeting.wait()
            taken = list(given)
            meeting.wait()
            return taken

        return swap

    return [swap_of(rank) for rank in range(n)]


def on_threads(n: int, body: Callable[[int], T], timeout: float = 40) -> list[T]:
    """What ``body(rank)`` returns in ``n`` threads; raises what one of them raises."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(body, range(n), timeout=timeout))


def make_ipc(
    rank: int,
    n: int,
    library: str,
    path: str,
    board: BoardHandle | Board,
    driver: HostDriver | None = None,
    *,
    timeout: float = 20.0,
    limits: Limits = LIMITS,
    probe_seconds: float = 10.0,
) -> Communicator:
    """This rank's end of a group of all members of ``board``."""
    setup.ENDPOINT_LINGER = 30.0  # so that nothing is left to the end of the process
    mine = board if isinstance(board, Board) else Board.attach(board, rank)
    over = make_comm(rank, mine, path)
    return Communicator(
        IpcBackend.create(
            driver or HostDriver(library),
            rank,
            n,
            all_gather_bytes_over(over),
            name="tp",
            timeout=timeout,
            watch=mine,
            layout=small_layout(n),
            limits=limits,
            probe_seconds=probe_seconds,
        )
    )


def ipc_of(comm: Communicator) -> IpcBackend:
    """The backend of what `make_ipc` made."""
    assert isinstance(comm.backend, IpcBackend)
    return comm.backend
