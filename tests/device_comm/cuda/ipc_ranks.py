"""How tests make an `IpcComm` in the processes of `tests.ranks`, over a device of host threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.cuda.agree import swap_over
from device_comm.cuda.ipc_comm import IpcComm
from shm_broadcast import Board
from tests.device_comm.cuda.emulator import LIMITS
from tests.device_comm.cuda.host_driver import HostDriver, small_layout
from tests.device_comm.shm_ranks import make_comm

if TYPE_CHECKING:
    from device_comm.cuda.launch import Limits
    from shm_broadcast import BoardHandle


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
) -> IpcComm:
    """This rank's end of a group of all members of ``board``."""
    mine = board if isinstance(board, Board) else Board.attach(board, rank)
    over = make_comm(rank, mine, path)
    return IpcComm.create(
        driver or HostDriver(library),
        rank,
        n,
        swap_over(over),
        name="tp",
        timeout=timeout,
        watch=mine,
        layout=small_layout(n),
        limits=limits,
        probe_seconds=probe_seconds,
    )
