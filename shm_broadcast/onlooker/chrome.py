"""Histories as a trace in the JSON format of Chrome, which ui.perfetto.dev shows.

Each process is a track group, with a track for each of its groups, on the clock that all
processes of the host share. Overlapping operations of a group get separate tracks, since one track
cannot show them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shm_broadcast import layout
from shm_broadcast.errors import DRIVER_RANK, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.onlooker.pasts import MemberPast

_QUEUES: Final = "queues"
_CALLS: Final = "calls"
_QUEUE_VERBS: Final = layout.DID_NAMES[layout.DID_ENQUEUE :]


def chrome_trace(boards: Sequence[Sequence[MemberPast]], now: int) -> dict[str, Any]:
    """The trace of all members of some boards.

    Args:
        boards: their members.
        now: monotonic ns; operations that have not ended are drawn until then.
    """
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    processes: dict[int, list[MemberPast]] = {}
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
    members: Sequence[MemberPast], now: int
) -> list[tuple[PastOperation, MemberPast, str]]:
    """All operations of a process, with the name of a track that is free for each."""
    free: dict[str, list[int]] = {}
    placed = []
    every = [(past, member) for member in members for past in member.past]
    for past, member in sorted(every, key=lambda each: each[0].begin):
        track = past.group or (_QUEUES if past.verb in _QUEUE_VERBS else _CALLS)
        ends = free.setdefault(track, [])
        lane = next((index for index, end in enumerate(ends) if end <= past.begin), len(ends))
        ends[lane : lane + 1] = [now if past.end is None else past.end]
        placed.append((past, member, f"{track} ({lane + 1})" if lane else track))
    return placed


def _event(past: PastOperation, member: MemberPast, track: int, now: int) -> dict[str, Any]:
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


def _title(member: MemberPast, several: bool) -> str:
    """What a process is called, where there are ``several`` pools or not."""
    status = member.seen.status
    pool = f" of {member.pool}" if several and member.pool and status.rank != DRIVER_RANK else ""
    where = f", {member.seen.place}" if member.seen.place else ""
    ended = ", ended" if status.state == "lost" else ""
    return f"{name_of(status.rank)}{pool}{where}{ended}"


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
