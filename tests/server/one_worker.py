"""A pool of one decoder that is in this process: steps can be held, and workers lost."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch

from coordinator.rank_grid import RankGrid
from server.errors import WorkerError, WorkerLostError
from server.workers.decoder import DecoderWorker
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_groups import FakeContext, alone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from server.workers.decoder.decoder_cache import ScheduledSequence
    from shm_broadcast import CoordinatorError, MemberStatus

LOST = WorkerLostError(0, 1, "killed by SIGKILL")


class OneWorker:
    """Looks like a `WorkerPool`. A step waits while it is held, then calls ``before``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.context: Any = FakeContext(alone(), torch.device("cpu"), lambda *_: None)
        self.worker = DecoderWorker(self.context, folder, **{"slots": 3, "length": 64, **options})
        self.failure: CoordinatorError | None = None
        self.restarting: CoordinatorError | None = None
        self.last_failure: tuple[float, CoordinatorError] | None = None
        self.restarts = 0
        self.grid = RankGrid.of({"dp": 1, "pp": 1, "tp": 1})
        self.steps: list[list[ScheduledSequence]] = []
        self.before: Callable[[int], None] = lambda _: None
        self.under_way = 0
        self._allowed = math.inf
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()  # as a worker makes its calls

    def call(self, method: str, *args: Any, **_options: Any) -> Any:
        if method == "step":
            with self._changed:
                self.under_way += 1
                assert self._changed.wait_for(self._may_go, PATIENCE_SECONDS)
                self.under_way -= 1
                self.steps.append(*args)
                number = len(self.steps)
            self.before(number)
        try:
            with self._one_at_a_time:
                return getattr(self.worker, method)(*args)
        except Exception as error:
            raise WorkerError(0, method, type(error).__name__, str(error), "") from error

    def hold(self, after: int = 0) -> None:
        self._allow(len(self.steps) + after)

    def go(self) -> None:
        self._allow(math.inf)

    def _allow(self, steps: float) -> None:
        with self._changed:
            self._allowed = steps
            self._changed.notify_all()

    def _may_go(self) -> bool:
        return len(self.steps) < self._allowed

    def lose(self) -> None:
        self.worker.restore(self.context)

    def status(self) -> list[MemberStatus]:
        return []

    def hang_report(self) -> list[str]:
        return []

    def totals(self) -> dict[int, Any]:
        return {}

    def shutdown(self, _timeout: float) -> None:
        self.go()
