"""What kernels wait for, and how all end if a rank does not come or a host aborts.

Flags and packets are written by hand, as a peer would write them.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Algorithm, ErrorCode, Phase
from device_comm.span import Span
from tests.device_comm.cuda.emulator import (
    NEAR_WRAP,
    SECONDS,
    Rank,
    World,
    at,
    moved,
    run_threads,
    small_layout,
)
from tests.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from device_comm.cuda.ipc.abi import KernelLaunch
    from tests.device_comm.cuda.emulator import Emulation

FIRST = NEAR_WRAP + 1
"""The epoch of the first launch."""
MOMENT = 0.05
"""Seconds in which a kernel that has nothing to wait for ends."""
BYTES = torch.uint8

# --- the layout of memory ----------------------------------------------------------------

NAMES = """
MAX_RANKS MAX_BLOCKS MAX_THREADS MIN_THREADS MAX_LANES CHANNEL_SETS ALIGN
REGION_ABORT REGION_CLAIMED REGION_EPOCH REGION_PACKET_EPOCH REGION_TICKETS REGION_FLAGS
REGION_CHANNELS REGION_STAGING CONTROL_ABORT CONTROL_RECORD GROUP_BYTES JOB_BYTES
"""
AGREED = (
    *(getattr(abi, name) for name in NAMES.split()),
    *(ErrorCode.TIMEOUT, ErrorCode.PEER, ErrorCode.ABORTED),
    *(Phase.START, Phase.END, Phase.PACKET, Phase.PUT, Phase.TAKE),
    *(ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG),
)
"""In the order of ``layout`` in emulation/emulate.cpp."""


def test_host_and_kernels_have_the_same_layout(emulation_library: Path) -> None:
    layout = ctypes.CDLL(str(emulation_library)).layout
    layout.restype = ctypes.POINTER(ctypes.c_uint64)
    assert tuple(layout()[: len(AGREED)]) == AGREED


# --- flags -------------------------------------------------------------------------------


def come(world: World, epoch: int, *, block: int, phase: Phase = Phase.START) -> None:
    """Let a block of rank 1 come to a meeting of a kernel, as rank 0 sees it."""
    flag = abi.REGION_FLAGS + (block * abi.MAX_RANKS + 1) * 8
    world.region(0)[flag : flag + 8].view(torch.int64).fill_(2 * epoch + phase)


def test_an_epoch_ends_with_the_last_block(emulation: Emulation) -> None:
    """Of two, the first one is done long before the other; in the second epoch as in the first."""
    world = World(small_layout(2))
    rank, buffer = Rank(world, 0, emulation), torch.zeros(400, dtype=BYTES)
    for epoch in (FIRST, FIRST + 1):
        launches = rank.plan.broadcast(buffer.data_ptr(), buffer.nbytes, 1)
        assert [launch.grid for launch in launches] == [2]
        with ThreadPoolExecutor(1) as beside:
            come(world, epoch, block=0)
            done = beside.submit(rank.run, launches)
            with pytest.raises(TimeoutError):
                done.result(MOMENT)
            assert world.epoch(0) == epoch - 1
            come(world, epoch, block=1)
            done.result()
        assert world.epoch(0) == epoch


def test_a_rank_at_the_end_has_been_at_the_start(emulation: Emulation) -> None:
    """A peer may be at the end before this rank has looked whether it is at the start."""
    world = World(small_layout(2), timeout=1.0)
    rank, numbers = Rank(world, 0, emulation), torch.ones(100)
    for block in range(2):
        come(world, FIRST, block=block, phase=Phase.END)
    rank.all_reduce(numbers, numbers, algorithm=Algorithm.TWO_SHOT)
    assert world.epoch(0) == FIRST


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
def test_a_kernel_ends_when_no_peer_reads_its_source(emulation: Emulation, verb: str) -> None:
    """All that it makes is there before: it waits for the one that is still reading."""
    world = World(small_layout(2))
    rank, sources = Rank(world, 0, emulation), (torch.full((4,), 1.0), torch.full((4,), 2.0))
    packed = bytearray(abi.pack_sources([source.data_ptr() for source in sources]))
    table = torch.frombuffer(packed, dtype=BYTES).data_ptr()
    expected = torch.cat(sources) if verb == "all_gather" else sources[0] + sources[1]
    output = torch.zeros_like(expected)
    pointers = output.data_ptr(), sources[0].data_ptr()
    launches: list[KernelLaunch]
    if verb == "all_gather":
        launches = rank.plan.all_gather(*pointers, (16, 16), table=table)
    else:
        arguments = (16, 0), torch.float32, ReduceOp.SUM
        launches = rank.plan.reduce_scatter(*pointers, *arguments, table=table)
    come(world, FIRST, block=0)
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(rank.run, launches)
        until(lambda: torch.equal(output, expected))
        with pytest.raises(TimeoutError):
            done.result(MOMENT)
        come(world, FIRST, block=0, phase=Phase.END)
        done.result()


@pytest.mark.parametrize("start", [0, 2**31 - 3, NEAR_WRAP])
def test_every_launch_counts_once(emulation: Emulation, start: int) -> None:
    def body(rank: Rank) -> None:
        for _ in range(6):
            rank.run(rank.plan.barrier())
            number = torch.tensor([float(rank.rank + 1)])
            rank.all_reduce(number, number)
            assert number.item() == 3.0

    world = World(small_layout(2), start=start)
    run_threads(world, emulation, body)
    for rank in range(2):
        assert world.epoch(rank) == start + 6
        assert world.epoch(rank, abi.REGION_PACKET_EPOCH) == start + 6


# --- packets -----------------------------------------------------------------------------

MINE = [1.0, 2.0, 3.0, 4.0]
THEIRS = [10.0, 20.0, 30.0, 40.0]
BOTH = [11.0, 22.0, 33.0, 44.0]


def cell(world: World, epoch: int, *, at: int = 0, source: int = 1) -> torch.Tensor:
    """Where the first cell of an epoch arrives, as two halves of two words."""
    return world.packets(at, source, epoch)[:, 0]


def words(numbers: Sequence[float], epoch: int) -> torch.Tensor:
    """A cell as it travels: each number with the epoch above it."""
    bits = struct.unpack("<4I", struct.pack("<4f", *numbers))
    packed = struct.pack("<4Q", *(low | epoch % 2**32 << 32 for low in bits))
    return torch.frombuffer(bytearray(packed), dtype=torch.int64).view(2, 2)


def reduce_one_cell(world: World, emulation: Emulation) -> list[float]:
    rank, numbers = Rank(world, 0, emulation), torch.tensor(MINE)
    rank.all_reduce(numbers, numbers)
    return numbers.tolist()


@pytest.mark.parametrize("late", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_cell_counts_when_all_its_words_are_of_the_epoch(
    emulation: Emulation, late: tuple[int, int]
) -> None:
    world = World(small_layout(2))
    theirs, arrived = words(THEIRS, FIRST), cell(world, FIRST)
    arrived.copy_(theirs)
    arrived[late] = words([99.0] * 4, FIRST - 2)[late]
    with ThreadPoolExecutor(1) as beside:
        result: Future[list[float]] = beside.submit(reduce_one_cell, world, emulation)
        with pytest.raises(TimeoutError):
            result.result(MOMENT)
        arrived[late] = theirs[late]
        assert result.result() == BOTH


def test_a_peer_may_be_one_epoch_ahead(emulation: Emulation) -> None:
    world = World(small_layout(2))
    cell(world, FIRST).copy_(words(THEIRS, FIRST))
    cell(world, FIRST + 1).copy_(words(MINE, FIRST + 1))
    assert reduce_one_cell(world, emulation) == BOTH
    assert reduce_one_cell(world, emulation) == [2.0, 4.0, 6.0, 8.0]
    for epoch in (FIRST, FIRST + 1):
        assert torch.equal(cell(world, epoch, at=1, source=0), words(MINE, epoch))


def test_halves_of_all_cells_lie_side_by_side(emulation: Emulation) -> None:
    """So that threads that write at the same time write one piece of memory."""

    def body(rank: Rank) -> None:
        numbers = torch.arange(20.0) + rank.rank
        rank.all_reduce(numbers, numbers)

    world = World(small_layout(2))
    run_threads(world, emulation, body)
    first, second = world.packets(0, 1, FIRST).reshape(2, -1)[:, :10].int().view(torch.float32)
    given = torch.arange(20.0).view(5, 2, 2) + 1
    assert torch.equal(first, given[:, 0].flatten())
    assert torch.equal(second, given[:, 1].flatten())


@pytest.mark.parametrize("start", [-1, 2**32 - 1])
def test_what_a_region_is_filled_with_is_of_no_epoch(emulation: Emulation, start: int) -> None:
    """Not even of one whose 32 bits are 0."""
    world = World(small_layout(2), start=start, timeout=MOMENT)
    with pytest.raises(AssertionError, match="culprit=1"):
        reduce_one_cell(world, emulation)
    assert world.record(0).code is ErrorCode.TIMEOUT


def test_no_packet_lives_to_see_its_epoch_again(emulation: Emulation) -> None:
    """Cells that are not used are wiped in turn: 4 cells in each of 2 areas, by 8 launches."""
    world = World(small_layout(2, packet_bytes=64))
    layout = world.layout
    for rank in range(2):
        world.region(rank)[layout.packets : layout.channels].fill_(0x55)

    def body(rank: Rank) -> None:
        for _ in range(8):
            number = torch.ones(1)
            rank.all_reduce(number, number)
            assert number.item() == 2.0

    run_threads(world, emulation, body)
    for where in itertools.product(range(2), repeat=3):
        assert not world.packets(*where)[:, 1:].any()


# --- channels ----------------------------------------------------------------------------


def test_messages_of_all_sizes_between_all_ranks(emulation: Emulation) -> None:
    """Rings in both directions; the slots hold a fraction of what is sent."""
    n = 4

    def body(rank: Rank) -> None:
        for turn, count in enumerate((1, 64, 65, 1000, 5003)):
            parts = [moved(r, count, BYTES) for r in range(n)]
            assert count == 1 or len({part.numpy().tobytes() for part in parts}) == n
            for step in range(1, n):
                after, before = (rank.rank + step) % n, (rank.rank - step) % n
                source = at(parts[rank.rank], turn)
                output = at(torch.zeros_like(source), step)
                rank.shift(source, after, output, before)
                assert torch.equal(output, parts[before])

    run_threads(World(small_layout(n)), emulation, body)


def test_sends_that_fit_into_a_channel_need_no_receive(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        peer = 1 - rank.rank
        for turn in range(10):
            output = torch.zeros(256, dtype=BYTES)
            rank.send(moved(rank.rank + turn, 256, BYTES), peer)
            rank.recv(output, peer)
            assert torch.equal(output, moved(peer + turn, 256, BYTES))

    run_threads(World(small_layout(2)), emulation, body)


def test_a_message_is_not_taken_for_a_part_of_a_collective(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        peer = 1 - rank.rank
        part = moved(rank.rank + 2, 64, BYTES)
        rank.send(moved(rank.rank, 64, BYTES), peer)
        output = torch.zeros(128, dtype=BYTES)
        rank.all_to_all(output, torch.cat([part, part]), [64, 64], [64, 64])
        assert torch.equal(output, torch.cat([moved(r + 2, 64, BYTES) for r in range(2)]))
        message = torch.zeros(64, dtype=BYTES)
        rank.recv(message, peer)
        assert torch.equal(message, moved(peer, 64, BYTES))

    run_threads(World(small_layout(2)), emulation, body)


# --- ranks that do not come, hosts that abort ---------------------------------------------

SIZE = 400
PATIENT = (0, 1)
MISSING = 2
IMPATIENT = 3
"""The one whose time is over first. It begins when the patient ones have come."""


def all_reduce(rank: Rank, buffer: int, algorithm: Algorithm) -> list[KernelLaunch]:
    op = ReduceOp.SUM
    return rank.plan.all_reduce(buffer, buffer, SIZE, torch.float32, op, algorithm=algorithm)


def norm(rank: Rank, buffer: int) -> list[KernelLaunch]:
    row = Span(buffer, SIZE)
    return rank.plan.all_reduce_norm((row, row, row), (row, row), torch.float32, 1.0)


KINDS: dict[str, tuple[Phase, Callable[[Rank, int], list[KernelLaunch]]]] = {
    "barrier": (Phase.START, lambda rank, _: rank.plan.barrier()),
    "broadcast": (Phase.START, lambda rank, buffer: rank.plan.broadcast(buffer, SIZE, 0)),
    "one-shot": (Phase.START, lambda rank, buffer: all_reduce(rank, buffer, Algorithm.ONE_SHOT)),
    "two-shot": (Phase.START, lambda rank, buffer: all_reduce(rank, buffer, Algorithm.TWO_SHOT)),
    "packets": (Phase.PACKET, lambda rank, buffer: all_reduce(rank, buffer, Algorithm.PACKETS)),
    "norm": (Phase.PACKET, norm),
    "send": (Phase.PUT, lambda rank, buffer: rank.plan.send(buffer, SIZE, MISSING)),
    "recv": (Phase.TAKE, lambda rank, buffer: rank.plan.recv(buffer, SIZE, MISSING)),
}


def has_come(rank: Rank, peer: int, kind: str) -> bool:
    """Whether ``peer`` has done for ``rank`` all that it does before it waits for others."""
    world, (phase, launches) = rank.world, KINDS[kind]
    if phase is Phase.START:
        blocks = max(launch.grid for launch in launches(rank, 0))
        return world.has_come(peer, blocks, rank.rank)
    if phase is Phase.PACKET:
        epoch = world.epoch(rank.rank, abi.REGION_PACKET_EPOCH) + 1
        return bool(world.packets(rank.rank, peer, epoch)[:, : SIZE // abi.ALIGN].all())
    return True


def stuck(rank: Rank, kind: str) -> list[int]:
    """Run one operation, which may fail; the values that the bytes of its result have then."""
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    rank.attempt(KINDS[kind][1](rank, buffer.data_ptr()))
    return [int(value) for value in buffer.unique()]


def gets(rank: int, kind: str) -> bool:
    """Whether ``rank`` has a result of the operation."""
    return kind not in ("barrier", "send") and (kind, rank) != ("broadcast", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_is_named(emulation: Emulation, kind: str) -> None:
    world = World(small_layout(4))

    def body(rank: Rank) -> list[int]:
        if rank.rank == IMPATIENT:
            until(lambda: all(has_come(rank, peer, kind) for peer in PATIENT))
            world.timeout = 0.2
            return stuck(Rank(world, IMPATIENT, emulation), kind)
        return stuck(rank, kind) if rank.rank in PATIENT else []

    began = time.monotonic()
    results = run_threads(world, emulation, body)
    for rank in (*PATIENT, IMPATIENT):
        assert results[rank] == ([0xFF] if gets(rank, kind) else [0]), "what looks like a result"
    assert time.monotonic() - began < SECONDS / 2
    phase, _ = KINDS[kind]
    records = [world.record(rank) for rank in range(4) if rank != MISSING]
    reporters = {record.reporter for record in records if record.code is ErrorCode.TIMEOUT}
    assert reporters
    for rank, record in zip((0, 1, 3), records, strict=True):
        assert record.culprit == MISSING
        assert record.phase is phase
        assert record.code is (ErrorCode.TIMEOUT if rank in reporters else ErrorCode.PEER)
        assert record.reporter in reporters and (rank not in reporters or record.reporter == rank)
        assert 0 <= record.epoch - NEAR_WRAP <= 2
    assert world.record(MISSING).code is ErrorCode.NONE


def test_a_late_rank_gets_no_number_and_a_record(emulation: Emulation) -> None:
    """The others gave up in the first of four broadcasts: what comes is no number in any."""
    world = World(small_layout(2), timeout=0.1)

    def body(rank: Rank) -> list[int]:
        if rank.rank == 1:
            until(lambda: world.record(0).code is ErrorCode.TIMEOUT)
        got = []
        for turn in range(4):
            buffer = torch.full((SIZE,), turn + 1 if rank.rank == 0 else 0, dtype=torch.uint8)
            rank.attempt(rank.plan.broadcast(buffer.data_ptr(), SIZE, 0))
            assert len(buffer.unique()) == 1
            got.append(int(buffer[0]))
        return got

    _, got = run_threads(world, emulation, body)
    assert got == [0xFF] * 4
    assert world.record(0).code is ErrorCode.TIMEOUT
    late = world.record(1)
    assert (late.code, late.reporter, late.culprit) == (ErrorCode.PEER, 0, 1)


def test_a_rank_that_stops_midway_is_named(emulation: Emulation) -> None:
    """Rank 1 comes to the start, as its flags say, and never gets on."""
    world = World(small_layout(2), timeout=0.1)
    region, number = world.region(0), 2 * (NEAR_WRAP + 1)
    for block in range(world.limits.max_blocks):
        flag = abi.REGION_FLAGS + (block * abi.MAX_RANKS + 1) * 8
        region[flag : flag + 8].view(torch.int64).fill_(number)
    stuck(Rank(world, 0, emulation), "two-shot")
    expected = abi.ErrorRecord(ErrorCode.TIMEOUT, 1, 0, Phase.END, NEAR_WRAP + 1)
    assert world.record(0) == expected


@pytest.mark.parametrize("kind", ["barrier", "packets", "recv"])
def test_the_host_aborts_all_ranks(emulation: Emulation, kind: str) -> None:
    world = World(small_layout(4), timeout=0.0)  # for ever

    def body(rank: Rank) -> None:
        if rank.rank == MISSING:
            return
        if rank.rank == 1:
            timer = threading.Timer(0.05, lambda: world.control(1)[abi.CONTROL_ABORT].fill_(1))
            timer.start()
        stuck(rank, kind)

    run_threads(world, emulation, body)
    aborted = world.record(1)
    assert (aborted.code, aborted.culprit, aborted.reporter) == (ErrorCode.ABORTED, 1, 1)
    for rank in (0, 3):
        record = world.record(rank)
        assert (record.code, record.culprit, record.reporter) == (ErrorCode.PEER, 1, 1)


def test_a_group_that_gave_up_ends_all_that_waits(emulation: Emulation) -> None:
    world = World(small_layout(2), timeout=0.05)
    stuck(Rank(world, 0, emulation), "barrier")
    first = world.record(0)
    assert first.code is ErrorCode.TIMEOUT
    world.timeout = 60.0
    rank = Rank(world, 0, emulation)
    began = time.monotonic()
    for kind in KINDS:
        if kind not in ("send", "recv"):
            stuck(rank, kind)
    assert time.monotonic() - began < SECONDS / 2
    assert world.record(0) == first
