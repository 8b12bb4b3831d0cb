"""Ranks that never come, and hosts that abort: all end, and their records say why."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Algorithm, ErrorCode, Phase
from device_comm.span import Span
from tests.device_comm.cuda.emulated_world import (
    NEAR_WRAP,
    SECONDS,
    Rank,
    World,
    run_threads,
    small_layout,
)
from tests.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.cuda.ipc.abi import KernelLaunch
    from tests.device_comm.cuda.emulator import Emulation

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
def test_a_rank_that_does_not_come_is_named(emulation: Emulation, kind: str) -> None:
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


def test_a_rank_that_comes_late_gets_what_was_meant_for_it_or_learns_why_not(
    emulation: Emulation,
) -> None:
    """The others gave up in the first of four broadcasts: what comes is no number in any."""
    world = World(small_layout(2), timeout=0.1)
    given = [torch.full((SIZE,), turn + 1, dtype=torch.uint8) for turn in range(4)]

    def body(rank: Rank) -> list[int]:
        if rank.rank == 1:
            until(lambda: world.record(0).code is ErrorCode.TIMEOUT)
        got = []
        for turn in range(4):
            buffer = given[turn].clone() if rank.rank == 0 else torch.zeros_like(given[turn])
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
    rank = Rank(world, 0, emulation)
    rank.attempt(rank.plan.barrier())
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
