"""What tests that need a CUDA device share. ``make gpu-test`` runs them all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from device_comm.cuda.agree import swap_over
from device_comm.cuda.cupy_driver import CupyDriver
from device_comm.cuda.ipc_comm import IpcComm
from shm_broadcast import Board, BoardHandle
from tests.device_comm.shm_ranks import make_comm

if TYPE_CHECKING:
    from collections.abc import Iterator


def own_device(rank: int) -> torch.device:
    """The GPUs in turn: ranks share where there are more of them."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def make_gpu_comm(
    rank: int, n: int, handle: BoardHandle, path: str, *, timeout: float = 30.0
) -> Iterator[IpcComm]:
    """This rank's end of a group of all members of a board."""
    device = own_device(rank)
    board = Board.attach(handle, rank)
    driver = CupyDriver(device)
    with make_comm(rank, board, path) as over:
        comm = IpcComm.create(
            driver, rank, n, swap_over(over), name="tp", timeout=timeout, watch=board
        )
        with comm:
            yield comm
    driver.close()
