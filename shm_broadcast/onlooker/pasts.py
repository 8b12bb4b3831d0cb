"""The histories of a program's members: what each did last, even if its process has been killed.

A history is on a board, so it exists as long as any process of the program holds the board.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast.board.history import read_history
from shm_broadcast.board.outward import read_groups
from shm_broadcast.onlooker.programs import copy_of_board

if TYPE_CHECKING:
    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.outward import Membership
    from shm_broadcast.onlooker.processes import Scan
    from shm_broadcast.onlooker.programs import BoardSeen, MemberSeen, Program


@dataclass(frozen=True, slots=True)
class MemberPast:
    """What a member of a board did.

    Attributes:
        seen: the member.
        groups: the groups that it is in.
        past: its last operations, the oldest first.
        pool: its board's name, if that is a pool's; else ``""``.
    """

    seen: MemberSeen
    groups: tuple[Membership, ...]
    past: tuple[PastOperation, ...]
    pool: str = ""


def pasts(seen: Scan, program: Program) -> list[tuple[MemberPast, ...]]:
    """What the members of each board of a program did; those without a history are left out."""
    return [past for board in program.boards if (past := _of_board(seen, program, board))]


def _of_board(seen: Scan, program: Program, board: BoardSeen) -> tuple[MemberPast, ...]:
    nonce, count = bytes.fromhex(board.key), len(board.members)
    held = (seen.processes[pid].held for pid in program.pids)
    segment = next(each[nonce] for each in held if nonce in each)
    copy = copy_of_board(segment)
    if copy is None:
        return ()
    with suppress(OSError), segment.opened() as fd:  # its holders may have ended

        def read(at: int, size: int) -> bytes:
            return os.pread(fd, size, at)

        return tuple(
            MemberPast(
                member,
                read_groups(copy, index, count),
                read_history(copy, index, count, read),
                board.name if board.is_pool else "",
            )
            for index, member in enumerate(board.members)
        )
    return ()
