"""What stops a rank's kernels: the thread that looks at the board."""

from __future__ import annotations

import struct

from device_comm import Identity
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.setup import KernelWatchdog
from shm_broadcast import Board
from tests.patience import until
from tests.shm_broadcast.test_board import bury


def test_the_end_of_a_rank_is_noticed_after_another_has_closed() -> None:
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
