"""Carrying out the operations of one rank: in order, and on a `Progress` thread where they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.shm.collectives.collective import Collective
from shm_broadcast.errors import CoordinatorError, GroupAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.operation import Operation
    from device_comm.work import Pending
    from shm_broadcast.progress import Lane, Progress, Task


class Execution:
    """Where operations take place.

    Attributes:
        collectives: all of them take place here, one after the other.
        messages: one lane for each direction, ``send`` or ``recv``, and rank at the other end, once
            there was a message.
        fail: ends the group with an error.
    """

    def __init__(self, progress: Progress, fail: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self.fail = fail
        self.collectives = progress.lane(fail)
        self.messages: dict[tuple[str, int], Lane] = {}

    def message_lane(self, verb: str, peer: int) -> Lane:
        """The lane of such messages, which is made if there was none before."""
        lane = self.messages.get((verb, peer))
        if lane is None:
            lane = self.messages[verb, peer] = self._progress.lane(self.fail)
        return lane

    def perform(self, lane: Lane, task: Task, operation: Operation) -> Pending | None:
        """Carry out ``task`` for ``operation``, behind those under way."""
        try:
            return lane.perform(
                task, lambda: operation.deadline, operation.background, operation.ended
            )
        except GroupAbortedError:
            if isinstance(task, Collective):
                task.check_divergence()
            raise
        except CoordinatorError:
            raise
        except BaseException as error:
            # The steps refuse a plan if the one before was given up, and the group with it.
            if isinstance(error, RuntimeError):
                lane.board.check(task.operation)
            # Interrupted midway: this rank is out of step for good.
            lane.board.abort(error)
            raise
