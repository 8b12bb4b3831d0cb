"""Joins what several hosts see of one program: each sees the processes on it only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shm_broadcast.onlooker.programs import BoardSeen, MemberSeen, Program


@dataclass(frozen=True, slots=True)
class HostSeen:
    """What another host sees of a program.

    Attributes:
        host: what it is called.
        shared: the key of the board here, of whose members some are on that host.
        there: that host's own board for these members.
        beside: its further boards.
    """

    host: str
    shared: str
    there: BoardSeen
    beside: tuple[BoardSeen, ...]


def joined(program: Program, elsewhere: Iterable[HostSeen]) -> Program:
    """A program with its members, and boards, on other hosts."""
    boards = list(program.boards)
    for seen in elsewhere:
        for place, board in enumerate(boards):
            if board.key == seen.shared and len(board.members) == len(seen.there.members):
                there = zip(board.members, _named(seen.there, seen.host), strict=True)
                members = tuple(here if here.status.pid else found for here, found in there)
                boards[place] = replace(board, members=members)
                boards += [replace(each, members=_named(each, seen.host)) for each in seen.beside]
                break
    return replace(program, boards=tuple(boards))


def _named(board: BoardSeen, host: str) -> tuple[MemberSeen, ...]:
    """A host's members of a board, as on that host."""
    return tuple(replace(each, status=replace(each.status, host=host)) for each in board.members)
