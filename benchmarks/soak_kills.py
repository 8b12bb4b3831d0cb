"""SIGKILL at random moments of start-up, traffic and shut-down.

A round is a driver with two workers: it makes a board, a queue to all of them and one back from
each, sends calls and collects replies for a while, and shuts everything down. At a random moment
one or two of the three are killed. Every survivor must be at its end within a second of the kill,
or of the round's own end: it returned, or raised one of our errors. Then nothing may be left: no
descriptor in a survivor, no word on stderr. None of them may use a file in /dev/shm: nothing would
unlink what a killed process has made there.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shm_broadcast import (
    Board,
    CoordinatorError,
    Deadline,
    GroupTimeoutError,
    MessageQueue,
    ProcessId,
    ProcessWatch,
)
from shm_broadcast.queue.handle import SMALLEST_CAPACITY
from shm_broadcast.state.stacks import write_stacks_when_asked

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext

    from shm_broadcast import BoardHandle, QueueHandle

LIMIT = 1.0
"""Seconds in which a survivor must be at its end."""

_WORKERS = 2
_TRAFFIC = 0.25
_STUCK = 20.0


@dataclass
class Killed:
    """What the rounds have shown.

    Attributes:
        rounds: how many there were.
        ends: how survivors ended, and how often.
        slowest: seconds from the kill to the last survivor's end, at most.
        wrong: what must not have happened, in words.
    """

    rounds: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def kill_at_random(
    context: ForkServerContext,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    limit: float = LIMIT,
) -> Killed:
    """Play ``rounds`` rounds; a survivor has ``limit`` seconds."""
    shown, draw = Killed(), random.Random(seed)
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            _Round(context, Path(folder), random.Random(draw.random()), limit).play(shown)
        if number % 10 == 9:
            say(f"{number + 1} of {rounds} kills, slowest end {shown.slowest:.3f} s")
    return shown


class _Round:
    def __init__(
        self, context: ForkServerContext, folder: Path, draw: random.Random, limit: float
    ) -> None:
        self._context = context
        self._folder = folder
        self._draw = draw
        self._limit = limit

    def play(self, shown: Killed) -> None:
        processes, pipes = [], []
        for member in range(_WORKERS + 1):
            ours, theirs = self._context.Pipe()
            arguments = (theirs, str(self._folder), member)
            process = self._context.Process(target=_take_part, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        go = time.monotonic()
        _put(self._folder, "go", ([process.pid for process in processes], go + _TRAFFIC))
        killed_at = go + self._draw.uniform(0, _TRAFFIC + 0.1)
        victims = self._draw.sample(range(_WORKERS + 1), self._draw.choice([1, 1, 2]))
        time.sleep(max(killed_at - time.monotonic(), 0))
        for member, process in enumerate(processes):
            shown.wrong += [f"member {member} uses {each}" for each in named_memory(process.pid)]
        for victim in victims:
            processes[victim].kill()  # SIGKILL; it may have ended in good order just before
        killed_at = time.monotonic()
        due = max(killed_at, go + _TRAFFIC)
        shown.rounds += 1
        for member in {*range(_WORKERS + 1)} - {*victims}:
            self._hear(member, pipes[member], due, shown)
        for member, process in enumerate(processes):
            process.join(_STUCK)
            if process.exitcode is None:
                shown.wrong.append(f"member {member} did not end")
                process.kill()
                process.join()
            process.close()
            words = self._folder / f"stderr {member}"
            if words.exists() and words.read_text():
                shown.wrong.append(f"member {member} wrote: {words.read_text()[-2000:]}")

    def _hear(self, member: int, pipe: Any, due: float, shown: Killed) -> None:
        try:
            told = pipe.recv() if pipe.poll(_STUCK) else ("hangs", due + _STUCK, 0)
        except EOFError:
            told = ("died", due, 0)
        how, at, leaked = told
        shown.ends[how] = shown.ends.get(how, 0) + 1
        shown.slowest = max(shown.slowest, at - due)
        if how in ("hangs", "died") or how.startswith("wrong"):
            shown.wrong.append(f"member {member}: {how}")
        if at - due > self._limit:
            shown.wrong.append(f"member {member}: {how} {at - due:.2f} s after it was due")
        if leaked:
            shown.wrong.append(f"member {member}: {how}, and left {leaked} descriptors")


def _take_part(pipe: Any, folder: str, member: int) -> None:
    path = Path(folder)
    errors = os.open(path / f"stderr {member}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.close(errors)
    gc.freeze()  # what was imported need not be searched in the end
    before = _descriptors()
    pipe.send("began")
    try:
        pids, until = _get(path, "go", os.getppid())
        if member == 0:
            _drive(path, pids, until)
        else:
            _work(path, pids, member)
        how = "returned"
    except CoordinatorError as error:
        how = type(error).__name__
    except ProcessLookupError:
        how = "its driver had gone before it began"
    except Exception as error:  # noqa: BLE001 - told to the parent
        how = f"wrong: {type(error).__name__}: {error}"
    at = time.monotonic()
    gc.collect()
    pipe.send((how, at, _descriptors() - before))


def _drive(folder: Path, pids: list[int], until: float) -> None:
    workers = range(1, _WORKERS + 1)
    with Board.create(_WORKERS + 1, member=0, name="soak") as board:
        calls = MessageQueue.on_board(board, 0, workers, SMALLEST_CAPACITY)
        replies = [MessageQueue.on_board(board, each, [0], SMALLEST_CAPACITY) for each in workers]
        _put(
            folder,
            "handles",
            (board.handle(), calls.export_handle(), [each.export_handle() for each in replies]),
        )
        try:
            _await_workers(board, pids[1:])
            draw = random.Random(pids[0])
            while time.monotonic() < until:
                data = draw.randbytes(draw.choice([10, 3000, 200_000]))
                calls.enqueue(data, _STUCK)
                for reply in replies:
                    _require(reply.dequeue(_STUCK) == zlib.crc32(data))
        except CoordinatorError as error:
            board.abort(error)
            raise
        finally:
            for queue in (calls, *replies):
                queue.shutdown()


def _await_workers(board: Board, pids: list[int]) -> None:
    """As a supervisor does: a worker that ends before it has joined is nobody's peer yet."""
    watches = [ProcessWatch(ProcessId.of(pid)) for pid in pids]
    deadline = Deadline.after(_STUCK)
    try:
        while not all(map(board.joined, range(board.n_members))):
            if deadline.expired or not all(watch.alive() for watch in watches):
                raise GroupTimeoutError("join", _STUCK)
            time.sleep(0.02)
    finally:
        for watch in watches:
            watch.close()


def _work(folder: Path, pids: list[int], member: int) -> None:
    handles: tuple[BoardHandle, QueueHandle, list[QueueHandle]] = _get(folder, "handles", pids[0])
    board_handle, calls_handle, replies_handles = handles
    with Board.attach(board_handle, member) as board:
        calls = MessageQueue.attach(calls_handle, board)
        replies = MessageQueue.attach(replies_handles[member - 1], board)
        try:
            while True:
                replies.enqueue(zlib.crc32(calls.dequeue(_STUCK)), _STUCK)
        finally:
            for queue in (calls, replies):
                queue.shutdown()


def _put(folder: Path, name: str, value: Any) -> None:
    unfinished = folder / f".{name}"
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(folder / name)


def _get(folder: Path, name: str, giver: int) -> Any:
    """What process ``giver`` leaves; ProcessLookupError if it ends before."""
    watch = ProcessWatch(ProcessId.of(giver))
    try:
        while not (folder / name).exists():
            if not watch.alive():
                raise ProcessLookupError(giver)
            time.sleep(0.002)
    finally:
        watch.close()
    return pickle.loads((folder / name).read_bytes())


def named_memory(pid: int | None) -> set[str]:
    """The files in /dev/shm that a process has mapped; none if it has ended."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {line[line.index("/dev/shm/") :] for line in mapped.splitlines() if "/dev/shm/" in line}


def _descriptors() -> int:
    write_stacks_when_asked()  # whose file a process keeps for good, so it is always counted
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _require(right: bool) -> None:
    if not right:
        raise ValueError("a reply is not that of its call")
