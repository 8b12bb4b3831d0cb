"""How tests make communicators over `ShmBackend` in the processes of `tests.ranks`.

Handles pass through a file.
"""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_comm import Communicator, ShmBackend
from device_comm.shm import layout
from shm_broadcast import Board, BoardHandle
from tests.patience import until
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shm_broadcast.executor import ProgressEngine


def on_ranks(n: int, may_die: Collection[int] = ()) -> Callable[..., Any]:
    """Decorates a test that each of ``n`` ranks runs: ``test(rank, n, path, board, *parameters)``.

    All get one path of a file that does not exist yet, and the handle of a new board.
    """

    def decorate(body: Callable[..., None], hidden: int = 4) -> Callable[..., None]:
        def test(store_path: str, **given: object) -> None:
            run_ranks(n, body, store_path, NEW_BOARD, *given.values(), may_die=may_die)

        made: Any = test
        made.__name__, made.__module__, made.__doc__ = body.__name__, body.__module__, body.__doc__
        made.body, body.__qualname__ = body, f"{body.__name__}.body"  # where ranks find it
        path = inspect.Parameter("store_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [*inspect.signature(body).parameters.values()][hidden:]
        made.__signature__ = inspect.Signature([path, *parameters])
        return made

    return decorate


def on_comms(n: int, may_die: Collection[int] = ()) -> Callable[..., Any]:
    """As `on_ranks`, for a test of a communicator of all ranks: ``test(comm, *parameters)``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def on_rank(rank: int, n: int, path: str, board: BoardHandle, *given: object) -> None:
            with make_comm(rank, board, path) as comm:
                body(comm, *given)

        return on_ranks(n, may_die)(on_rank, 1)

    return decorate


def share_through(path: str) -> Callable[[bytes | None], bytes]:
    def share(payload: bytes | None) -> bytes:
        file, whole = Path(path), Path(f"{path}.whole")
        if payload is not None:
            file.write_bytes(payload)
            whole.touch()
            return payload
        until(whole.exists, f"{path} was not written")
        return file.read_bytes()

    return share


def make_comm(
    rank: int,
    board: BoardHandle | Board,
    path: str,
    *,
    members: Sequence[int] | None = None,
    name: str = "tp",
    timeout: float | None = 20.0,
    progress: ProgressEngine | None = None,
    fast_path: bool = True,
) -> Communicator:
    """This rank's end of a group of all members of ``board``, or of some.

    Without ``fast_path`` all operations take the slow path.
    """
    mine = board if isinstance(board, Board) else Board.attach(board, rank)
    ranks = range(mine.n_members) if members is None else members
    backend = ShmBackend.create(
        mine, ranks, share_through(path), name=name, timeout=timeout, progress=progress
    )
    if not fast_path:
        backend.fast_path = None
    return Communicator(backend)


def shm_of(comm: Communicator) -> ShmBackend:
    assert isinstance(comm.backend, ShmBackend)
    return comm.backend


def wait_until_others_wait(comm: Communicator) -> None:
    """Return once all others have arrived in a step that this rank has not begun."""
    backend = shm_of(comm)
    words, group = backend._segment.words, backend._layout
    done = words.load64(group.rank_line(comm.rank) + layout.RANK_DONE)

    def waits(rank: int) -> bool:
        slots = [group.slot(buffer, rank) for buffer in range(layout.BUFFERS)]
        return max(words.load64(slot + layout.SLOT_ARRIVED) for slot in slots) > done

    until(lambda: all(waits(rank) for rank in comm.peers))
