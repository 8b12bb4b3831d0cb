"""No data race, as ThreadSanitizer sees it; and it does see the order of memory being weakened."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import Algorithm
from device_comm.span import Span
from tests.device_comm.cuda.emulator import KERNELS, World, build, moved, small_layout, why_not
from tests.device_comm.oracle import reduced

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from device_comm.cuda.ipc.abi import KernelLaunch

TSAN = ("-O1", "-fsanitize=thread")
RACES = 66
"""The exit status of a program in which ThreadSanitizer has found some."""
MISUSED = 2
"""The exit status of the program without arguments."""
REPLAY_SECONDS = 120.0
ROOM = 8 << 20
COUNT = 77

GUARD = "#define GC_MEETING_CUH\n"
SWITCH = """
#include <cstdlib>
#include <cstring>
inline const char *const breaks = std::getenv("BREAK");
inline bool broken(const char *what) { return breaks && !std::strcmp(breaks, what); }
"""
BREAKS = {
    "release": ("if (release)\n", 'if (release && !broken("release"))\n'),
    "acquire": (
        "theirs.load(memory_order_acquire)",
        '(broken("acquire") ? theirs.load(memory_order_relaxed)'
        " : theirs.load(memory_order_acquire))",
    ),
    "sync": ("!all_of_block(begins_)", '!(broken("sync") ? begins_ : all_of_block(begins_))'),
}
"""Texts of ``meeting.cuh``, and what makes races of them if the variable ``BREAK`` names them."""


class Recording:
    """What all ranks launch, over memory that they share; a program replays it."""

    def __init__(self, n: int) -> None:
        layout = small_layout(n, staging_bytes=512, packet_bytes=320)
        self._memory = torch.zeros(ROOM, dtype=torch.uint8)
        self._used = World.size(layout)
        world = World(layout, memory=self._memory[: self._used])
        self._streams: dict[object, list[KernelLaunch]] = {}
        self._addresses: list[int] = []
        self._expected: list[tuple[int, Tensor]] = []
        self.plans = [world.planner(rank) for rank in range(n)]

    def put(self, tensor: Tensor) -> int:
        """Place a tensor in memory; its address."""
        begin = -(-self._used // 16) * 16
        self._used = begin + tensor.nbytes
        self._memory[begin : self._used] = tensor.reshape(-1).view(torch.uint8)
        return self._memory.data_ptr() + begin

    def table(self, sources: Sequence[int]) -> int:
        """Place a table of sources in memory; its address."""
        address = self.put(torch.tensor([*sources, *(0,) * (8 - len(sources))]))
        begin = address - self._memory.data_ptr()
        self._addresses += range(begin, begin + 8 * len(sources), 8)
        return address

    def launch(self, stream: object, launches: list[KernelLaunch]) -> None:
        """Append to a stream; each runs by itself."""
        self._streams.setdefault(stream, []).extend(launches)

    def expect(self, address: int, tensor: Tensor) -> None:
        """When all is done, this is to be at ``address``."""
        self._expected.append((address - self._memory.data_ptr(), tensor))

    def replay(
        self, program: Sequence[str], folder: Path, broken: str = ""
    ) -> tuple[int, str, int]:
        """Run a program; its exit status, what it said, and how many results are wrong."""
        recording, result = folder / "recording", folder / "result"
        recording.write_bytes(self._packed())
        done = subprocess.run(
            [*program, str(recording), str(result)],
            capture_output=True,
            check=False,
            env=os.environ | {"BREAK": broken},
            text=True,
            timeout=REPLAY_SECONDS,
        )
        wrong = len(self._expected)
        if result.exists():
            memory = torch.from_file(str(result), size=self._used_pages(), dtype=torch.uint8)
            wrong = sum(
                not torch.equal(memory[begin : begin + tensor.nbytes].view(tensor.dtype), tensor)
                for begin, tensor in self._expected
            )
        return done.returncode, done.stderr, wrong

    def _used_pages(self) -> int:
        return -(-self._used // 4096) * 4096

    def _packed(self) -> bytes:
        size = self._used_pages()
        header = (self._memory.data_ptr(), size, len(self._addresses), len(self._streams))
        parts = [struct.pack("<4Q", *header), self._memory[:size].numpy().tobytes()]
        parts.append(struct.pack(f"<{len(self._addresses)}Q", *self._addresses))
        for launches in self._streams.values():
            parts.append(struct.pack("<Q", len(launches)))
            parts += [
                struct.pack("<48sQQ", launch.kernel.encode(), launch.grid, launch.block)
                + launch.args[0]
                for launch in launches
            ]
        return b"".join(parts)


def record(n: int, turns: int) -> Recording:
    """All kinds of collectives one after the other, and messages beside them."""
    recording = Recording(n)
    for turn in range(turns):
        parts = [moved(rank + n * turn, COUNT, torch.float32) for rank in range(n)]
        sources = [recording.put(part) for part in parts]
        table = recording.table(sources)
        for rank in range(n):
            record_turn(recording, rank, turn % n, parts, sources, table)
    return recording


def record_turn(
    recording: Recording, rank: int, root: int, parts: list[Tensor], sources: list[int], table: int
) -> None:
    plan, n, size = recording.plans[rank], len(parts), parts[0].nbytes
    total = reduced(parts, ReduceOp.SUM)
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
    # A ring on streams of its own; the slots hold less than is sent.
    after, before = (rank + 1) % n, (rank - 1) % n
    recording.launch((rank, "send"), plan.send(sources[rank], size, after))
    output = recording.put(torch.zeros(COUNT))
    recording.launch((rank, "recv"), plan.recv(output, size, before))
    recording.expect(output, parts[before])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the program that replays, with ThreadSanitizer and `BREAKS` in it."""
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path_factory.mktemp("races")
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    meeting = kernels / "meeting.cuh"
    text = meeting.read_text()
    for old, new in ((GUARD, GUARD + SWITCH), *BREAKS.values()):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    meeting.write_text(text)
    built = str(build("replay.cpp", folder / "replay", TSAN, kernels))
    for command in ([built], ["setarch", "-R", built]):
        if shutil.which(command[0]) and subprocess.run(command, check=False).returncode == MISUSED:
            return command
    pytest.skip("ThreadSanitizer does not get the addresses that it wants")


@pytest.mark.parametrize(("n", "turns"), [(2, 3), (8, 1)])
def test_there_are_no_races(program: list[str], tmp_path: Path, n: int, turns: int) -> None:
    status, said, wrong = record(n, turns).replay(program, tmp_path)
    assert (status, wrong) == (0, 0), said[-6000:]


@pytest.mark.parametrize("name", BREAKS)
def test_weaker_meetings_are_races(program: list[str], tmp_path: Path, name: str) -> None:
    replays = (record(2, 4).replay(program, tmp_path, name) for _ in range(3))
    assert any(status == RACES and "data race" in said for status, said, _ in replays)
