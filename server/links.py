"""What ties the workers of a pool to their driver: shared memory, and a store to meet in.

Workers are members 0 … n-1 of the board, by rank; the driver is the last member.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from typing import TYPE_CHECKING

from coordinator import host_store
from server.messages import Start
from shm_broadcast import DRIVER_RANK, Board, MessageQueue

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from server.plan import Plan


class Links:
    """The driver's end of all that is shared. Close it when the workers have gone.

    Attributes:
        board: where everyone is seen, and through which all are aborted.
        driver: the driver's member number.
        calls: the queue to all workers.
        replies: the queue from each worker, by rank.
    """

    def __init__(self, plan: Plan) -> None:
        """Reserve the memory and host the store, at a loopback address and a port of its own.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self._plan = plan
        self.driver = plan.n_workers
        with ExitStack() as undo:
            self.board = undo.enter_context(
                Board.create(
                    plan.n_workers + 1, self.driver, "pool", (*range(plan.n_workers), DRIVER_RANK)
                )
            )
            self.calls = undo.enter_context(
                MessageQueue.on_board(
                    self.board, self.driver, range(self.driver), plan.config.call_capacity
                )
            )
            self.replies = [
                undo.enter_context(
                    MessageQueue.on_board(
                        self.board, rank, [self.driver], plan.config.reply_capacity
                    )
                )
                for rank in range(self.driver)
            ]
            self._store: TCPStore | None = host_store()
            self._store_at = self._store.host, self._store.port
            self._undo = undo.pop_all()

    def start_of(self, rank: int) -> Start:
        """What the worker of ``rank`` has to know."""
        plan, (host, port) = self._plan, self._store_at
        handles = (
            self.board.handle(),
            self.calls.export_handle(),
            self.replies[rank].export_handle(),
        )
        return Start(
            rank=rank,
            tp=plan.tp,
            pp=plan.pp,
            dp=plan.dp,
            device=plan.devices[rank],
            store_host=host,
            store_port=port,
            handles=pickle.dumps(handles),
            worker=plan.worker,
            worker_kwargs=plan.worker_kwargs,
            main=plan.main,
            timeout=plan.start_timeout,
        )

    def close(self) -> None:
        """Give everything up; idempotent."""
        self._undo.close()
        self._store = None
