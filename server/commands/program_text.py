"""Describe a program as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

from shm_broadcast.errors import counted, name_of

from ..inspection.diagnosis import Diagnosis, diagnose
from ..inspection.snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    QueueSnapshot,
)

UNLIMITED: Final = 1 << 16
"""Width without a terminal."""

NO_PROGRAM: Final = (
    "No pool or group of this user runs on this host. "
    "Ranks in a rendezvous log the ranks that they wait for."
)

_COLUMNS: Final = (
    *("who", "place", "pid", "state", "operation", "for", "waits for", "cores", "memory"),
)
_RIGHT: Final = ("pid", "for", "memory")
_DROPPED: Final = ("memory", "cores", "place", "pid")
"""Columns that a narrow terminal lacks, in order."""


_CONDITIONS: Final = {"stopped": "stopped", "in the kernel": "kernel"}
"""Names of states of a process that does not run."""

_NAMED: Final = 4
_TITLE: Final = 100
_STACK_LINES: Final = 100


def shown(line: str, width: int) -> str:
    """Return a line without control characters, cut to ``width``."""
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return text if len(text) <= width else text[: width - 3] + "..."


def overview(programs: Sequence[Program], width: int = UNLIMITED) -> str:
    """Return a table of programs."""
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
    """Describe a program: boards, members, queues, and the process that blocks others."""
    lines = [
        _title(seen, width),
        shown(f"{counted(len(seen.pids), 'process')}, {_bytes(seen.shared)} shared", width),
    ]
    for number, board in enumerate(seen.boards, 1):
        several = f"board {number}" if len(seen.boards) > 1 else ""
        title = ", ".join(filter(None, (several, board.name)))
        lines += ["", *_board(title, board, width)]
    sentences = [line for line in diagnose(seen).sentences if not line.startswith(" ")]
    return "\n".join([*lines, "", *(line for each in sentences for line in _wrapped(each, width))])


def explanation(
    seen: Program, verdict: Diagnosis, stacks: Mapping[str, str], width: int = UNLIMITED
) -> str:
    """Return the diagnosis of a program, then the stacks of its sample."""
    lines = [_title(seen, width), ""]
    lines += [line for each in verdict.sentences for line in _wrapped(each, width)]
    for process in verdict.sample:
        if process.name in stacks:
            stack = stacks[process.name].splitlines()
            if len(stack) == 1:
                lines += ["", f"No stack of {process.who}: {stack[0]}."]
                continue
            lines += ["", f"The stack of {process.who}, the latest call first:"]
            lines += [f"  {shown(line, UNLIMITED)}".rstrip() for line in stack[:_STACK_LINES]]
            if len(stack) > _STACK_LINES:
                lines.append(f"  ... and {len(stack) - _STACK_LINES} lines more")
    return "\n".join(lines)


def _title(seen: Program, width: int) -> str:
    return shown(f"pid {seen.pid}  {_command(seen)}", min(width, _TITLE))


def _command(seen: Program) -> str:
    """Shorten only the paths of interpreter and script: options matter."""
    words = seen.command.split(" ")
    names = [PurePath(word).name if word.startswith("/") else word for word in words[:2]]
    return " ".join(names + words[2:])


def _board(title: str, board: BoardSnapshot, width: int) -> list[str]:
    rows = [row for member in board.members for row in _rows(board, member)]
    columns = [c for c in _COLUMNS if any(row[c] for row in rows)]
    if len({member.cores for member in board.members if member.cores}) < 2:
        columns = [c for c in columns if c != "cores"]  # no binding, or the same for all
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
    state = {"closed": "left"}.get(status.activity, status.activity)
    if status.state in ("idle", "busy"):
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
        each["state"] = state
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
