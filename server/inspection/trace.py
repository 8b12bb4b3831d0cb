"""Write the recorded operations of a program as a trace for Perfetto.

A history exists as long as any process of the program holds its board. Each process is a track
group with a track for each of its groups, on the host's monotonic clock. Overlapping operations of
a group get separate tracks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from shm_broadcast import layout
from shm_broadcast.errors import DRIVER_RANK, name_of
from shm_broadcast.state.flight_recorder import OperationRecord, read_history

from .snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    Scan,
    copy_of_board,
)


@dataclass(frozen=True, slots=True)
class MemberHistory:
    """The last operations of a member of a board."""

    seen: MemberSnapshot
    past: tuple[OperationRecord, ...]  # the oldest first
    pool: str = ""  # its board's name if that is a pool's; else ""


def histories(seen: Scan, program: Program) -> list[tuple[MemberHistory, ...]]:
    """Return the histories of each board's members; boards without histories are omitted."""
    return [past for board in program.boards if (past := _of_board(seen, program, board))]


def _of_board(seen: Scan, program: Program, board: BoardSnapshot) -> tuple[MemberHistory, ...]:
    nonce, count = bytes.fromhex(board.key), len(board.members)
    held = (seen.processes[pid].held for pid in program.pids)
    segment = next(each[nonce] for each in held if nonce in each)
    copy = copy_of_board(segment)
    if copy is None:
        return ()
    with suppress(OSError), segment.opened() as fd:  # its holders may have exited

        def read(at: int, size: int) -> bytes:
            return os.pread(fd, size, at)

        return tuple(
            MemberHistory(
                member,
                read_history(copy, index, count, read),
                board.name if board.is_pool else "",
            )
            for index, member in enumerate(board.members)
        )
    return ()


_QUEUES: Final = "queues"
_CALLS: Final = "calls"
_QUEUE_VERBS: Final = layout.DID_NAMES[layout.DID_ENQUEUE :]


def chrome_trace(boards: Sequence[Sequence[MemberHistory]], now: int) -> dict[str, Any]:
    """Return the trace of all members of some boards.

    ``now`` is in monotonic ns; operations under way are drawn until then.
    """
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    processes: dict[int, list[MemberHistory]] = {}
    for member in (each for board in boards for each in board if each.past):
        processes.setdefault(member.seen.status.pid, []).append(member)
    several = len({member.pool for board in boards for member in board} - {""}) > 1
    for pid, members in processes.items():
        names.append(_named("process_name", pid, 0, _title(members[0], several)))
        order = {"sort_index": members[0].seen.status.rank}
        names.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": order})
        tracks: dict[str, int] = {}
        for past, member, track in _on_tracks(members, now):
            if track not in tracks:
                tracks[track] = len(tracks) + 1
                names.append(_named("thread_name", pid, tracks[track], track))
            events.append(_event(past, member, tracks[track], now))
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ns"}


def _on_tracks(
    members: Sequence[MemberHistory], now: int
) -> list[tuple[OperationRecord, MemberHistory, str]]:
    free: dict[str, list[int]] = {}
    placed = []
    every = [(past, member) for member in members for past in member.past]
    for past, member in sorted(every, key=lambda each: each[0].begin):
        track = past.group or (_QUEUES if past.verb in _QUEUE_VERBS else _CALLS)
        ends = free.setdefault(track, [])
        slot = next((index for index, end in enumerate(ends) if end <= past.begin), len(ends))
        ends[slot : slot + 1] = [now if past.end is None else past.end]
        placed.append((past, member, f"{track} ({slot + 1})" if slot else track))
    return placed


def _event(past: OperationRecord, member: MemberHistory, track: int, now: int) -> dict[str, Any]:
    end = max(now, past.begin) if past.end is None else past.end
    outcome = past.outcome
    if past.end is None and member.seen.status.state == "lost":
        outcome = "its process ended in it"
    args = {
        "group": past.group,
        "number": past.number,
        "bytes": past.size,
        "dtype": past.dtype,
        "outcome": outcome,
        "operation": past.sequence,
    }
    if past.peer is not None:
        args["peer"] = past.peer
    event = {
        "name": past.verb if past.outcome == "done" else f"{past.verb}, {past.outcome}",
        "cat": "call" if not past.group and past.verb not in _QUEUE_VERBS else "communication",
        "ph": "X",
        "ts": past.begin / 1000,
        "dur": (end - past.begin) / 1000,
        "pid": member.seen.status.pid,
        "tid": track,
        "args": {name: value for name, value in args.items() if value not in ("", 0)},
    }
    if past.outcome not in ("done", "under way"):
        event["cname"] = "terrible"
    return event


def _title(member: MemberHistory, several: bool) -> str:
    status = member.seen.status
    pool = f" of {member.pool}" if several and member.pool and status.rank != DRIVER_RANK else ""
    where = f", {member.seen.place}" if member.seen.place else ""
    ended = ", ended" if status.state == "lost" else ""
    return f"{name_of(status.rank)}{pool}{where}{ended}"


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
