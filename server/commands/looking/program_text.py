"""Choose a program, and show it as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

from shm_broadcast.errors import counted, name_of
from shm_broadcast.inspection.diagnosis import Diagnosis, diagnose
from shm_broadcast.inspection.snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    QueueSnapshot,
    Scan,
    of_process,
    programs,
)

from ..terminal import shown

UNLIMITED: Final = 1 << 16
"""The width of what is no terminal."""

NO_PROGRAM: Final = (
    "No pool or group of this user runs on this host. "
    "Ranks that have not met yet say in their logs for whom they wait."
)

_COLUMNS: Final = (
    *("who", "place", "pid", "state", "operation", "for", "waits for", "cores", "memory"),
)
_RIGHT: Final = ("pid", "for", "memory")
_DROPPED: Final = ("memory", "cores", "place", "pid")
"""Columns that are left out of a narrow terminal, in this order."""

_STATES: Final = {"closed": "left", "idle": "runs", "busy": "runs"}
"""How the states of `MemberStatus` are shown, where a member waits for nobody."""

_CONDITIONS: Final = {"stopped": "stopped", "in the kernel": "kernel"}
"""What is shown instead where its process does not run."""

_NAMED: Final = 4
_TITLE: Final = 100
_STACK_LINES: Final = 100


def overview(programs: Sequence[Program], width: int = UNLIMITED) -> str:
    """A line for each program."""
    rows = [
        {
            "pid": str(each.pid),
            "members": str(len({m.status.pid for b in each.boards for m in b.members} - {0})),
            "shared": _bytes(each.shared),
            "state": _in_short(each),
            "command": shown(_command(each), _TITLE),
        }
        for each in programs
    ]
    columns = ("pid", "members", "shared", "state", "command")
    return _table(columns, ("pid", "members", "shared"), rows, width)


def program(seen: Program, width: int = UNLIMITED) -> str:
    """All about a program: its boards, their members and queues, and who holds others up."""
    lines = [
        _title(seen, width),
        shown(f"{counted(len(seen.pids), 'process')}, {_bytes(seen.shared)} shared", width),
    ]
    for number, board in enumerate(seen.boards, 1):
        several = f"board {number}" if len(seen.boards) > 1 else ""
        title = ", ".join(filter(None, (several, board.name)))
        lines += ["", *_board(title, board, width)]
    told = [line for line in diagnose(seen).sentences if not line.startswith(" ")]
    return "\n".join([*lines, "", *(line for each in told for line in _wrapped(each, width))])


def explanation(
    seen: Program, verdict: Diagnosis, stacks: Mapping[str, str], width: int = UNLIMITED
) -> str:
    """The verdict about a program in sentences, then the stacks that tell more."""
    lines = [_title(seen, width), ""]
    lines += [line for each in verdict.sentences for line in _wrapped(each, width)]
    for party in verdict.sample:
        if party.name in stacks:
            told = stacks[party.name].splitlines()
            if len(told) == 1:
                lines += ["", f"No stack of {party.who}: {told[0]}."]
                continue
            lines += ["", f"The stack of {party.who}, the latest call first:"]
            lines += [f"  {shown(line, UNLIMITED)}".rstrip() for line in told[:_STACK_LINES]]
            if len(told) > _STACK_LINES:
                lines.append(f"  ... and {len(told) - _STACK_LINES} lines more")
    return "\n".join(lines)


def _title(seen: Program, width: int) -> str:
    return shown(f"pid {seen.pid}  {_command(seen)}", min(width, _TITLE))


def _command(seen: Program) -> str:
    """Its command line, without the folders of the interpreter and the script: options matter."""
    words = seen.command.split(" ")
    names = [PurePath(word).name if word.startswith("/") else word for word in words[:2]]
    return " ".join(names + words[2:])


def _board(title: str, board: BoardSnapshot, width: int) -> list[str]:
    rows = [row for member in board.members for row in _rows(board, member)]
    columns = [c for c in _COLUMNS if any(row[c] for row in rows)]
    if len({member.cores for member in board.members if member.cores}) < 2:
        columns = [c for c in columns if c != "cores"]  # nobody is bound, or all to the same
    for dropped in _DROPPED:
        if _width(columns, rows) > width and dropped in columns:
            columns.remove(dropped)
    members = counted(len(board.members), "member")
    lines = [shown(f"{title}: {members}" if title else members, width)]
    lines.append(_table(columns, _RIGHT, rows, width))
    behind = sorted((q for q in board.queues if q.behind), key=lambda queue: queue.writer)
    lines += [f"  {shown(_queue(each), width - 2)}" for each in behind]
    if len(board.queues) > len(behind):
        rest = counted(len(board.queues) - len(behind), "more queue" if behind else "queue")
        lines.append(f"  {rest}, all read")
    return lines


def _rows(board: BoardSnapshot, member: MemberSnapshot) -> list[dict[str, str]]:
    status = member.status
    operation = f"{status.operation} #{status.sequence}" if status.operation else ""
    state = _STATES.get(status.state, status.state)
    if state == "runs":
        state = _CONDITIONS.get(member.condition, state)
    row = {
        "who": name_of(status.rank),
        "place": member.place,
        "pid": str(status.pid or ""),
        "state": state,
        "operation": f"after {operation}" if status.state == "idle" and operation else operation,
        "for": "" if status.age is None else _time(status.age),
        "waits for": "",
        "cores": member.cores,
        "memory": _bytes(member.memory) if member.memory else "",
    }
    if not member.waits:
        return [row]
    rows = [dict.fromkeys(row, "") for _ in member.waits]
    rows[0] = row
    for each, wait in zip(rows, member.waits, strict=True):
        each["state"] = "stopped" if state == "stopped" else "waits"
        each["operation"] = operation if wait.operation == status.operation else wait.operation
        each["for"] = _time(wait.seconds)
        named = [name_of(board.members[m].status.rank) for m in wait.members[:_NAMED]]
        more = f" and {wait.count - _NAMED} more" if wait.count > _NAMED else ""
        each["waits for"] = ", ".join(named) + more
    return rows


def _queue(queue: QueueSnapshot) -> str:
    readers = [name_of(each.rank) for each in queue.readers]
    to = ", ".join(readers[:_NAMED])
    if len(readers) > _NAMED:
        to += f" and {len(readers) - _NAMED} more"
    text = f"{name_of(queue.writer)} -> {to}: {counted(queue.messages, 'message')}"
    slow = next(each for each in queue.readers if each.behind == queue.behind)
    used = f"{_bytes(queue.used)} of {_bytes(queue.capacity)} used"
    return f"{text}, {queue.behind} not read by {name_of(slow.rank)}, {used}"


def _in_short(seen: Program) -> str:
    verdict = diagnose(seen)
    if any(board.failure is not None for board in seen.boards):
        return "aborted"
    return "held up" if verdict.is_hang else "goes on"


def _table(
    columns: Sequence[str], right: Sequence[str], rows: Sequence[Mapping[str, str]], width: int
) -> str:
    everything = [dict(zip(columns, columns, strict=True)), *rows]
    sizes = {column: max(len(row[column]) for row in everything) for column in columns}
    lines = [
        "  ".join(
            row[column].rjust(sizes[column])
            if column in right
            else row[column].ljust(sizes[column])
            for column in columns
        )
        for row in everything
    ]
    return "\n".join("  " + shown(line.rstrip(), width - 2) for line in lines)


def _width(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    return sum(2 + max(len(column), *(len(row[column]) for row in rows)) for column in columns)


def _wrapped(line: str, width: int) -> list[str]:
    """A sentence in lines that are not wider than ``width``, where words allow it."""
    indent = "    "
    lines = [shown(line, UNLIMITED)]
    while len(lines[-1]) > width and " " in lines[-1][len(indent) : width].strip():
        last = lines.pop()
        cut = last.rindex(" ", 0, width)
        if not last[:cut].strip():
            return [*lines, last]
        lines += [last[:cut], indent + last[cut + 1 :]]
    return lines


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _bytes(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return (
                f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
            )
        number /= 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def check_pid(pid: int | None) -> None:
    """Raise ValueError unless ``pid`` is a process of this user; None is fine."""
    if pid is None:
        return
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        raise ValueError(f"no process has pid {pid}") from None
    if owner != os.geteuid():
        raise ValueError(f"pid {pid} belongs to another user")


def chosen(pid: int | None, seen: Scan) -> list[Program] | None:
    """The programs of a process, or without one the only program; None, and why on stderr."""
    found = programs(seen)
    if pid is not None:
        found = of_process(pid, seen, found)
        if not found:
            say_none_of(pid, seen)
        return found or None
    if len(found) == 1:
        return found
    pids = ", ".join(str(each.pid) for each in found)
    told = f"Which one? There are programs with pid {pids}." if found else NO_PROGRAM
    sys.stderr.write(f"{told}\n")
    return None


def say_none_of(pid: int, seen: Scan) -> None:
    """Say on stderr that a process has nothing to do with this library."""
    why = "it may not be looked into" if pid in seen.unseen else "it is in no pool or group of ours"
    sys.stderr.write(f"pid {pid}: {why}, and has started no process that is\n")
