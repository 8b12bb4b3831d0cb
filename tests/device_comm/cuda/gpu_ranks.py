"""How GPU tests make an `IpcBackend`: ranks share the devices there are."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from device_comm.cuda.agree import all_gather_bytes_over
from shm_broadcast import Board
from tests.device_comm.shm_ranks import make_comm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_comm import Communicator
    from shm_broadcast import BoardHandle


def make_cuda(
    rank: int,
    n: int,
    swap: Callable[[bytes], list[bytes]],
    *,
    index: int | None = None,
    **options: Any,
) -> Communicator:
    """This rank's end of a group on CUDA devices; ``index``: on this one."""
    # CuPy may speak of the machine. Nothing is restored, for ranks may be threads.
    warnings.simplefilter("ignore")
    from device_comm import Communicator
    from device_comm.cuda.cupy_driver import CupyDriver
    from device_comm.cuda.ipc.ipc_backend import IpcBackend

    device = rank % torch.cuda.device_count() if index is None else index
    torch.cuda.set_device(device)
    return Communicator(IpcBackend.create(CupyDriver(device), rank, n, swap, name="tp", **options))


@contextmanager
def cuda_comm(
    rank: int, n: int, path: str, handle: BoardHandle, **options: Any
) -> Iterator[Communicator]:
    """The same among processes that share a board."""
    options = {"timeout": 60.0} | options
    with (
        Board.attach(handle, rank) as board,
        make_comm(rank, board, path, timeout=60.0) as over,
        make_cuda(rank, n, all_gather_bytes_over(over), watch=board, **options) as comm,
    ):
        yield comm
