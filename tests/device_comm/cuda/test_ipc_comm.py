"""The table over `IpcBackend`, on a device of host threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import make_ipc
from tests.device_comm.suite import check_table, run_table
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from shm_broadcast import BoardHandle

REDUCED = {
    2: [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool],
    4: [torch.float32, torch.bfloat16, torch.int64],
}
"""Those with kernels, and some without."""

MOVED = {2: None, 4: [torch.float32, torch.int64, torch.uint8]}


def table(rank: int, n: int, library: str, path: str, board: BoardHandle) -> dict[str, str]:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        failures = run_table(comm, reduce_cases, REDUCED[n])
        failures |= run_table(comm, move_cases, MOVED[n])
        failures |= run_table(comm, named_cases)
    assert not driver.held
    return failures


@pytest.mark.parametrize("n", [2, 4])
def test_table(n: int, emulation_library: str, store_path: str) -> None:
    check_table(run_ranks(n, table, str(emulation_library), store_path, NEW_BOARD))
