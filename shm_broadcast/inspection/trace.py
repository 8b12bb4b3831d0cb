"""Write the recorded operations of a program as a trace for Perfetto, or as torch's dumps.

A history exists as long as any process of the program holds its board.

Perfetto: each process is a track group with a track for each of its groups, on the host's monotonic
clock. Overlapping operations of a group get separate tracks.

torch's analyser takes one pickle per rank, and matches the operations of each process group by
number. A transfer belongs to a group of its two ranks, as in torch. Names begin with ``gloo:``, one
of the few libraries that the analyser accepts.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from shm_broadcast import layout
from shm_broadcast.errors import DRIVER_RANK, name_of
from shm_broadcast.inspection.snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    Scan,
    copy_of_board,
)
from shm_broadcast.state.flight_recorder import OperationRecord, read_history
from shm_broadcast.state.status import Membership, read_groups


@dataclass(frozen=True, slots=True)
class MemberHistory:
    """The last operations of a member of a board."""

    seen: MemberSnapshot
    groups: tuple[Membership, ...]
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
                read_groups(copy, index, count),
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


DUMP_VERSION: Final = "2.10"

_NAMES: Final = {"all_gatherv": "all_gather_v", "reduce_scatterv": "reduce_scatter_v"}
_TRANSFERS: Final = ("send", "recv")
_BITS: Final = re.compile(r"\d+")
"""The bits of an element, in its dtype's name."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group, or two ranks of one; ``ranks`` are global, in the group's order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation in its group."""

    group: _Group
    line: int  # numbers count per line: the collectives, or the sends of one rank
    number: int  # matches it with operations of other ranks
    past: OperationRecord


def flight_dumps(board: Sequence[MemberHistory], epoch: int) -> dict[int, dict[str, Any]]:
    """Return the dump of each rank of a board that is in a group.

    Groups with members on another host are omitted. ``epoch``: ns to add to the monotonic clock for
    the time since 1970.
    """
    groups = _groups(board)
    steps = {
        each.seen.status.rank: list(_steps(each, groups))
        for each in board
        if any((each.seen.status.rank, group.name) in groups for group in each.groups)
    }
    first = _first_known(steps)
    dumps = {}
    for rank, taken in steps.items():
        kept = [each for each in taken if each.number >= first[each.group, each.line]]
        entries = [_entry(index, each, rank, epoch) for index, each in enumerate(kept)]
        shown = {groups[key]: None for key in groups if key[0] == rank}
        shown |= dict.fromkeys(each.group for taken in steps.values() for each in taken)
        config = {
            group.name: {"name": group.name, "desc": group.name, "ranks": str([*group.ranks])}
            for group in shown
            if rank in group.ranks
        }
        dumps[rank] = {
            "version": DUMP_VERSION,
            "pg_config": config,
            "pg_status": {},
            "entries": entries,
        }
    return dumps


def _groups(board: Sequence[MemberHistory]) -> dict[tuple[int, str], _Group]:
    ranks_of: dict[Membership, dict[int, int]] = defaultdict(dict)
    published = [(each.seen.status.rank, group) for each in board for group in each.groups]
    for rank, group in published:
        ranks_of[_of_rank_0(group)][group.rank] = rank
    whole = {}
    for rank, group in published:
        ranks = ranks_of[_of_rank_0(group)]
        if len(ranks) == group.size:
            members = tuple(ranks[index] for index in range(group.size))
            whole[rank, group.name] = _Group(group.name, members)
    return whole


def _of_rank_0(group: Membership) -> Membership:
    return replace(group, rank=0)


def _steps(member: MemberHistory, groups: Mapping[tuple[int, str], _Group]) -> Iterator[_Step]:
    """Yield a member's operations in groups, without earlier groups of the same name."""
    rank = member.seen.status.rank
    latest: dict[tuple[_Group, int], list[_Step]] = defaultdict(list)
    for past in member.past:
        group = groups.get((rank, past.group))
        if group is None or not past.number:
            continue
        if past.verb not in _TRANSFERS:
            step = _Step(group, 0, past.number, past)
        elif past.peer is not None and past.peer < len(group.ranks):
            step = _transfer(rank, group, past.peer, past)
        else:
            continue
        line = latest[step.group, step.line]
        if line and step.number <= line[-1].number:
            line.clear()
        line.append(step)
    every = [step for line in latest.values() for step in line]
    yield from sorted(every, key=lambda step: step.past.sequence)


def _transfer(rank: int, group: _Group, peer: int, past: OperationRecord) -> _Step:
    other = group.ranks[peer]
    pair = min(rank, other), max(rank, other)
    line = pair.index(rank if past.verb == "send" else other)
    # Each rank counts its sends from 1: odd and even numbers keep the two directions apart.
    number = 2 * past.number + line
    return _Step(_Group(f"{group.name} {pair[0]}:{pair[1]}", pair), line, number, past)


def _first_known(steps: Mapping[int, Sequence[_Step]]) -> dict[tuple[_Group, int], int]:
    """Return the first number of each line that all ranks with such operations have kept."""
    first: dict[tuple[_Group, int], int] = {}
    for taken in steps.values():
        lowest: dict[tuple[_Group, int], int] = {}
        for each in taken:
            lowest.setdefault((each.group, each.line), each.number)
        for line, number in lowest.items():
            first[line] = max(first.get(line, 0), number)
    return first


def _entry(index: int, step: _Step, rank: int, epoch: int) -> dict[str, Any]:
    past, group = step.past, step.group
    transfer = past.verb in _TRANSFERS
    name = f"gloo:{_NAMES.get(past.verb, past.verb)}"
    if transfer:
        here = group.ranks.index(rank)
        name += f" {here}->{1 - here}" if past.verb == "send" else f" {here}<-{1 - here}"
    given, got = _counts(past, len(group.ranks), group.ranks.index(rank) == past.peer)
    dtypes = [past.dtype or "uint8"]
    return {
        "record_id": index,
        "pg_id": 0,
        "process_group": (group.name, group.name),
        "collective_seq_id": step.number,
        "p2p_seq_id": step.number if transfer else 0,
        "op_id": past.sequence,
        "profiling_name": name,
        "time_created_ns": past.begin + epoch,
        "time_discovered_started_ns": past.begin + epoch,
        "time_discovered_completed_ns": None if past.end is None else past.end + epoch,
        "input_sizes": [[given]],
        "input_dtypes": dtypes,
        "output_sizes": [[got]],
        "output_dtypes": dtypes,
        "state": "completed" if past.outcome == "done" else "started",
        "timeout_ms": 0,
        "is_p2p": transfer,
        "retired": past.end is not None,
        "frames": [],
    }


def _counts(past: OperationRecord, size: int, root: bool) -> tuple[int, int]:
    """Return the numbers of elements of input and output; 0 if the bytes are no evidence."""
    bits = _BITS.search(past.dtype)
    count = past.size * 8 // int(bits[0] if bits else 8)
    match past.verb:
        case "all_gather":
            return count, count * size
        case "reduce_scatter":
            return count, count // size
        case "gather":
            return count, count * size if root else 0
        case "scatter":
            return (count, count // size) if root else (0, count)
        case "all_gatherv" | "reduce_scatterv" | "barrier":
            return 0, 0
    return count, count
