"""What every worker of a running vLLM is doing: ``python -m coordinator.plugins.vllm PID``."""

from __future__ import annotations

import sys

from coordinator.plugins.vllm.page import boards
from shm_broadcast import Board, SharedMemoryError


def report(pid: int) -> str:
    """A line for each group of the engine that ``pid`` is a process of, and one for each member.

    Raises:
        LookupError: it is no process of an engine with our parts inside.
    """
    lines: list[str] = []
    for name, handle in boards(pid):
        lines.append(name)
        try:
            board = Board.attach(handle, None)
        except SharedMemoryError as error:
            lines.append(f"  {error}")
            continue
        lines += [f"  {status}" for status in board.status()]
        board.close()
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m coordinator.plugins.vllm PID  (of any process of vLLM)")
    try:
        print(report(int(sys.argv[1])))  # noqa: T201
    except (LookupError, OSError) as error:
        sys.exit(str(error))
