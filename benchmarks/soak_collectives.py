"""Random collectives and messages of several groups, each answer compared with a local one.

The steps, the oracle and the groups are those of the tests in ``tests/device_comm``; here are more
of them.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast import Board, BoardHandle
from shm_broadcast.executor import ProgressEngine
from tests.device_comm.soak import draw, run
from tests.device_comm.test_shm_comm import make_groups
from tests.ranks import RanksFailedError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 20_000
"""Steps that are drawn at a time."""

_SECONDS_PER_CHUNK = 600.0


@dataclass(frozen=True)
class Collected:
    """What a run has shown.

    Attributes:
        ranks: how many there were.
        operations: how many were drawn; each group's members carried out theirs, all right.
        seconds: how long it took.
    """

    ranks: int
    operations: int
    seconds: float


def collect(ranks: int, operations: int, seed: int, say: Callable[[str], None]) -> Collected:
    """Carry out ``operations`` on ``ranks`` processes.

    Raises:
        RuntimeError: an answer was wrong, or a rank failed.
    """
    started = time.monotonic()
    chunks = -(-operations // CHUNK)
    limit = chunks * _SECONDS_PER_CHUNK
    with Board.create(ranks, None) as board, tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(ranks, _serve, f"{folder}/", board.handle(), chunks, seed, timeout=limit)
        except RanksFailedError as error:
            raise RuntimeError(f"{ranks} ranks: {error}") from error
    took = time.monotonic() - started
    say(f"{ranks} ranks: {chunks * CHUNK:,} collectives and messages right")
    return Collected(ranks, chunks * CHUNK, took)


def _serve(rank: int, n: int, path: str, board: BoardHandle, chunks: int, seed: int) -> None:
    with ExitStack() as stack:
        watch = stack.enter_context(Board.attach(board, rank))
        progress = ProgressEngine(watch)
        stack.callback(progress.close)
        comms, sizes = make_groups(stack, rank, n, watch, path, progress)
        for chunk in range(chunks):
            run(draw(seed + chunk, CHUNK, sizes), comms)
        comms[0].barrier()
