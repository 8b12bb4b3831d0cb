"""No data race, as ThreadSanitizer sees it; and it does see the order of memory being weakened."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import Algorithm
from device_comm.span import Span
from tests.device_comm.cuda.emulated_world import moved, small_layout
from tests.device_comm.cuda.emulator import KERNELS, build, why_not
from tests.device_comm.cuda.recording import Recording
from tests.device_comm.oracle import reduced

if TYPE_CHECKING:
    from pathlib import Path

TSAN = ("-O1", "-fsanitize=thread")
RACES = 66
"""The exit status of a program in which ThreadSanitizer has found some."""
MISUSED = 2
"""The exit status of the program without arguments."""
COUNT = 77

BREAKS = {
    "release": ("store(number, memory_order_release)", "store(number, memory_order_relaxed)"),
    "acquire": ("theirs.load(memory_order_acquire)", "theirs.load(memory_order_relaxed)"),
    "sync": ("if (!all_of_block(begins_)) return false;", "if (!begins_) return false;"),
}
"""Texts of ``meeting.cuh``, and what makes races of them."""


def record(n: int, turns: int, *, timeout: float = 30.0) -> Recording:
    """All kinds of collectives one after the other, and messages beside them."""
    recording = Recording(small_layout(n, staging_bytes=512, packet_bytes=320), timeout=timeout)
    for turn in range(turns):
        parts = [moved(rank + n * turn, COUNT, torch.float32) for rank in range(n)]
        sources = [recording.put(part) for part in parts]
        table = recording.table(sources)
        for rank in range(n):
            record_collectives(recording, rank, turn, parts, sources, table)
            record_messages(recording, rank, parts, sources)
    return recording


def record_collectives(
    recording: Recording,
    rank: int,
    turn: int,
    parts: list[torch.Tensor],
    sources: list[int],
    table: int,
) -> None:
    plan, n, size = recording.plans[rank], recording.n, parts[0].nbytes
    root, total = turn % n, reduced(parts, ReduceOp.SUM)
    for algorithm in Algorithm:
        for where in (0, table) if algorithm is not Algorithm.PACKETS else (0,):
            output = recording.put(torch.zeros(COUNT))
            arguments = output, sources[rank], size, torch.float32, ReduceOp.SUM
            launches = plan.all_reduce(*arguments, algorithm=algorithm, table=where)
            recording.launch(rank, launches)
            recording.expect(output, total)
    ones, kept = recording.put(torch.ones(64)), recording.put(torch.zeros(64))
    normed = recording.put(torch.zeros(64))
    puts = Span(sources[rank], 256), Span(ones, 256), Span(ones, 64)
    takes = Span(normed, 256), Span(kept, 256)
    recording.launch(rank, plan.all_reduce_norm(puts, takes, torch.float32, 1.0))
    recording.expect(kept, total[:64] + 1)
    row = recording.put(torch.zeros(n * COUNT))
    recording.launch(rank, plan.all_gather(row, sources[rank], (size,) * n))
    recording.expect(row, torch.cat(parts))
    buffer = recording.put(parts[rank])
    recording.launch(rank, plan.broadcast(buffer, size, root))
    recording.expect(buffer, parts[root])
    swapped = recording.put(torch.zeros(n * COUNT))
    recording.launch(rank, plan.all_to_all(swapped, row, (size,) * n, (size,) * n))
    recording.expect(swapped, parts[rank].repeat(n))


def record_messages(
    recording: Recording, rank: int, parts: list[torch.Tensor], sources: list[int]
) -> None:
    """A ring on streams of its own; the slots hold less than is sent."""
    plan, n, size = recording.plans[rank], recording.n, parts[0].nbytes
    after, before = (rank + 1) % n, (rank - 1) % n
    recording.launch((rank, "send"), plan.send(sources[rank], size, after))
    output = recording.put(torch.zeros(COUNT))
    recording.launch((rank, "recv"), plan.recv(output, size, before))
    recording.expect(output, parts[before])


def sanitized(folder: Path, old: str = "", new: str = "") -> list[str]:
    """Build the program that replays, with ThreadSanitizer in it; the command that runs it.

    In ``meeting.cuh``, ``new`` stands in the place of ``old``.
    """
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    meeting = kernels / "meeting.cuh"
    text = meeting.read_text()
    assert not old or text.count(old) == 1
    meeting.write_text(text.replace(old, new) if old else text)
    program = str(build("replay.cpp", folder / "replay", TSAN, kernels))
    for command in ([program], ["setarch", "-R", program]):
        if shutil.which(command[0]) and subprocess.run(command, check=False).returncode == MISUSED:
            return command
    pytest.skip("ThreadSanitizer does not get the addresses that it wants")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if why_not():
        pytest.skip(why_not())
    return sanitized(tmp_path_factory.mktemp("races"))


@pytest.fixture(scope="module")
def broken(program: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The broken programs, by the names of `BREAKS`."""
    with ThreadPoolExecutor(2) as builders:
        started = {
            name: builders.submit(sanitized, tmp_path_factory.mktemp("races"), *texts)
            for name, texts in BREAKS.items()
        }
        return {name: command.result() for name, command in started.items()}


@pytest.mark.parametrize(("n", "turns"), [(2, 3), (4, 2), (8, 1)])
def test_there_are_no_races(program: list[str], tmp_path: Path, n: int, turns: int) -> None:
    status, said, wrong = record(n, turns).replay(program, tmp_path)
    assert (status, wrong) == (0, 0), said[-6000:]


@pytest.mark.parametrize("name", BREAKS)
def test_weaker_meetings_are_races(broken: dict[str, list[str]], tmp_path: Path, name: str) -> None:
    replays = (record(2, 4).replay(broken[name], tmp_path) for _ in range(3))
    assert any(status == RACES and "data race" in said for status, said, _ in replays)
