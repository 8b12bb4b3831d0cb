"""Signal handlers that raise at every place where Python runs them, one place after the other."""

from __future__ import annotations

import dis
import os
import random
import sys
from contextlib import suppress
from functools import cache
from itertools import count, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

LIBRARY = ModuleType("library", "Python's own modules, as a package for `interruptions`.")
LIBRARY.__path__ = [os.path.dirname(os.__file__)]  # noqa: PTH120


class Interruption(BaseException):
    """What the signal handler raises."""


class Alarm(Interruption, Exception):
    """What that of SIGALRM may raise: an error as others."""


def interrupt(*_: object) -> None:
    """Be a signal handler that raises."""
    raise Interruption


def alarm() -> None:
    """Be a signal handler that raises what is taken for a plain error."""
    raise Alarm


def interruptions(
    call: Callable[[], object],
    *packages: ModuleType,
    handler: Callable[[], object] = interrupt,
    every: int = 1,
) -> Iterator[str]:
    """Repeat ``call``, each time interrupted at the next place in ``packages``; yield the place.

    Python runs signal handlers after calls, after jumps back, and where a function begins. With
    ``every`` each ``every``-th place is taken, from a random one.
    """
    folders = tuple(package.__path__[0] + os.sep for package in packages)
    for number in count(random.randrange(every), every):
        place = _interrupt(call, folders, number, handler)
        if place is None:
            return
        yield place


def _interrupt(
    call: Callable[[], object],
    folders: tuple[str, ...],
    number: int,
    handler: Callable[[], object],
) -> str | None:
    """Run ``handler`` at the ``number``-th place of ``call``; where that is, if there is one."""
    place: str | None = None
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number, place
        if event != "opcode" or place is not None:
            return step
        after, last[frame] = last.get(frame), frame.f_lasti
        if after is not None and (after, frame.f_lasti) in _places(frame.f_code):
            number -= 1
            if number < 0:
                place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                handler()
        return step

    def enter(frame: FrameType, _: str, __: object) -> Any:
        if place is not None or not frame.f_code.co_filename.startswith(folders):
            return None
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with suppress(Interruption):
            call()
    finally:
        sys.settrace(before)
        last.clear()  # what the frames hold goes at once
    return place


@cache
def _places(code: CodeType) -> frozenset[tuple[int, int]]:
    """The pairs of instructions, by offset, between which signal handlers run.

    Without those where an exception handler covers the first one only.
    """
    guards = {
        offset: (entry.target, entry.depth)
        for entry in reversed(dis._parse_exception_table(code))  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2)
    }
    instructions = list(dis.get_instructions(code))
    follows = {one.offset: two.offset for one, two in pairwise(instructions)}
    return frozenset(
        (one.offset, after)
        for one in instructions
        if one.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX") or "JUMP_BACKWARD" in one.opname
        for after in {follows.get(one.offset), one.argval if "JUMP" in one.opname else None}
        if after is not None and guards.get(one.offset) == guards.get(after)
    )
