"""What the driver shares with its workers for one generation: the board and the queues.

Each generation has a board, queues and groups of its own, so nothing that is left over from an
earlier one, be it a message or a process that hangs in an operation, can reach it.

Workers are members 0 to n-1 of the board, by rank; the driver is the last member.
"""

from __future__ import annotations

import pickle
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shm_broadcast import DRIVER_RANK, Board, MessageQueue

from ..control.cancelled_calls import CancelledCalls
from ..control.protocol import Start

if TYPE_CHECKING:
    from .pool_plan import PoolPlan


class Links:
    """The driver's ends of everything that is shared. Close it when the workers have ended.

    Attributes:
        board: the pool's board: liveness, status and abort.
        driver: the driver's member number.
        calls: the queue to all workers.
        replies: the queue from each worker, by rank.
        cancelled: the calls that nobody waits for any more.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Reserve the shared memory.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self._plan = plan
        self._secret = secrets.token_bytes()
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
            self.cancelled = undo.enter_context(CancelledCalls.create(plan.in_flight))
            self._undo = undo.pop_all()

    def start_of(self, rank: int, generation: int, first_call: int) -> Start:
        """The start message for the worker of ``rank``."""
        plan = self._plan
        handles = (
            self.board.handle(),
            self.calls.export_handle(),
            self.replies[rank].export_handle(),
            self.cancelled.handle(),
        )
        return Start(
            generation=generation,
            first_call=first_call,
            survives=plan.restart == "worker",
            rank=rank,
            tp=plan.tp,
            pp=plan.pp,
            dp=plan.dp,
            device=plan.devices[rank],
            secret=self._secret,
            handles=pickle.dumps(handles),
            zero_copy=plan.config.zero_copy,
            worker=plan.worker,
            worker_kwargs=plan.worker_kwargs,
            main=plan.main,
            timeout=plan.start_timeout,
        )

    def close(self) -> None:
        """Close everything; idempotent."""
        self._undo.close()
