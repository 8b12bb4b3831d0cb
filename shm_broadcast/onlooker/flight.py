"""Histories as the dumps that ``torch.distributed.flight_recorder.fr_trace`` analyses.

torch's analyser takes one pickle for each rank, and matches the operations of each process group by
their number. There a transfer between two ranks belongs to a group of these two, as in torch. The
names of operations begin with ``gloo:``, one of the few libraries that it knows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.outward import Membership
    from shm_broadcast.onlooker.pasts import MemberPast

DUMP_VERSION: Final = "2.10"

_NAMES: Final = {"all_gatherv": "all_gather_v", "reduce_scatterv": "reduce_scatter_v"}
_TRANSFERS: Final = ("send", "recv")
_BITS: Final = re.compile(r"\d+")
"""Those of an element, in its dtype's name."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group, or two ranks of one; ``ranks`` are the global ones, in the group's order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation in its group.

    Attributes:
        group: where.
        line: those of one line are numbered together: the collectives, or the sends of one rank.
        number: what matches it with operations of other ranks.
        past: the operation.
    """

    group: _Group
    line: int
    number: int
    past: PastOperation


def flight_dumps(board: Sequence[MemberPast], epoch: int) -> dict[int, dict[str, Any]]:
    """The dump of each rank of a board that is in a group.

    Groups with members that are not on this board, on another host, are left out.

    Args:
        board: its members.
        epoch: ns to add to the monotonic clock for the time since 1970.
    """
    groups = _groups(board)
    steps = {
        each.seen.status.rank: list(_steps(each, groups))
        for each in board
        if any((each.seen.status.rank, said.name) in groups for said in each.groups)
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


def _groups(board: Sequence[MemberPast]) -> dict[tuple[int, str], _Group]:
    """The groups whose members are all known: by a member's rank and the group's name."""
    found: dict[Membership, dict[int, int]] = defaultdict(dict)
    said = [(each.seen.status.rank, group) for each in board for group in each.groups]
    for rank, group in said:
        found[_of_rank_0(group)][group.rank] = rank
    whole = {}
    for rank, group in said:
        ranks = found[_of_rank_0(group)]
        if len(ranks) == group.size:
            members = tuple(ranks[index] for index in range(group.size))
            whole[rank, group.name] = _Group(group.name, members)
    return whole


def _of_rank_0(group: Membership) -> Membership:
    return replace(group, rank=0)


def _steps(member: MemberPast, groups: Mapping[tuple[int, str], _Group]) -> Iterator[_Step]:
    """A member's operations in groups, without those of an earlier group of the same name."""
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


def _transfer(rank: int, group: _Group, peer: int, past: PastOperation) -> _Step:
    other = group.ranks[peer]
    pair = min(rank, other), max(rank, other)
    line = pair.index(rank if past.verb == "send" else other)
    # Each rank counts its sends from 1: the two must not be taken for each other.
    number = 2 * past.number + line
    return _Step(_Group(f"{group.name} {pair[0]}:{pair[1]}", pair), line, number, past)


def _first_known(steps: Mapping[int, Sequence[_Step]]) -> dict[tuple[_Group, int], int]:
    """The first number of each line that no rank has forgotten, of those that know any."""
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


def _counts(past: PastOperation, size: int, root: bool) -> tuple[int, int]:
    """The elements that a rank gives and gets; 0 where its bytes do not tell."""
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
