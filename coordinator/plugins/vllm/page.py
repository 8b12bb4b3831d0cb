"""What an engine's processes tell: why it ended, and where its groups' boards are.

The first process, which the user started, keeps a page of memory without a name. The others, which
are started by it, find the page by the environment and add a line for each thing that they tell.
When the first process exits it prints why the engine ended, after all messages of vLLM's own.
`boards` reads the page from outside, while the engine runs.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shm_broadcast import BoardHandle  # noqa: TC001  (msgspec reads the annotation)

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE: Final = "GROUP_COORDINATOR_PAGE"
"""Where the page is: a path in /proc, while the first process lives."""


class Told(msgspec.Struct, omit_defaults=True):
    """One line of the page.

    Attributes:
        end: why the engine ended; ``""`` if this tells something else.
        group: the name of a group.
        board: its board.
    """

    end: str = ""
    group: str = ""
    board: BoardHandle | None = None


_LINE: Final = msgspec.json.Decoder(Told)


def keep() -> None:
    """Keep a page for the processes that this one starts, unless it was started by such a one.

    Collective: no.
    """
    if VARIABLE not in os.environ:
        fd = os.memfd_create("group-coordinator-page", os.MFD_CLOEXEC)
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
        atexit.register(_print_the_end, os.getpid(), fd)


def tell(**what: Any) -> None:
    """Add a line with the fields of `Told`; nothing without a page. Collective: no."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the first process has gone: nobody is left to tell
        return
    try:
        os.write(fd, msgspec.json.encode(Told(**what)) + b"\n")
    finally:
        os.close(fd)


def boards(pid: int) -> list[tuple[str, BoardHandle]]:
    """The names and boards of an engine's groups. Collective: no.

    Args:
        pid: of the engine's first process, or of any other of its processes.

    Raises:
        LookupError: this is no process of such an engine, or the engine tells nothing (yet).
    """
    for member in _family(pid):
        for text in Path(f"/proc/{member}/environ").read_bytes().split(b"\0"):
            name, _, path = text.decode(errors="replace").partition("=")
            if name == VARIABLE and Path(path).exists():
                told = _lines(Path(path).read_bytes())
                return [(each.group, each.board) for each in told if each.board]
    raise LookupError(f"pid {pid} is no process of an engine that keeps a page")


def _family(pid: int) -> Iterator[int]:
    """The process and its descendants: what the first one adds to its environment is not seen."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _lines(text: bytes) -> list[Told]:
    return [_LINE.decode(line) for line in text.splitlines()]


def _print_the_end(owner: int, fd: int) -> None:
    if os.getpid() != owner:
        return
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    reasons = [told.end for told in _lines(text) if told.end]
    if reasons:
        sys.stdout.flush()
        print(f"vLLM's engine has ended: {reasons[0]}", file=sys.stderr, flush=True)  # noqa: T201
