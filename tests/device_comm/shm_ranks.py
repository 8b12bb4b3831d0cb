"""How tests make communicators over `ShmBackend` in the processes of `tests.ranks`.

Handles pass through a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from device_comm import Communicator, ShmBackend
from shm_broadcast import Board, BoardHandle
from tests.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm_broadcast.executor import ProgressEngine


def share_through(path: str) -> Callable[[bytes | None], bytes]:
    """What `ShmBackend.create` shares its handle by."""

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
    """The backend of what `make_comm` made."""
    assert isinstance(comm.backend, ShmBackend)
    return comm.backend
