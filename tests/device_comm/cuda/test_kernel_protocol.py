"""What ranks do for each other: channels, sources in tables, epochs, stagings used again."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Algorithm, Limits
from tests.device_comm.cuda.emulated_world import (
    NEAR_WRAP,
    Rank,
    World,
    at,
    in_rank_order,
    moved,
    run_threads,
    same_numbers,
    small_layout,
    wild,
)
from tests.device_comm.oracle import reduced, values

if TYPE_CHECKING:
    from tests.device_comm.cuda.emulator import Emulation

# --- messages ----------------------------------------------------------------------------


def test_no_two_ranks_move_the_same() -> None:
    """Else nothing here could tell whose data came."""
    assert len({bytes(moved(rank, 64, torch.uint8).numpy()) for rank in range(40)}) == 40


def test_messages_of_all_sizes_between_all_ranks(emulation: Emulation) -> None:
    """Rings in both directions; the slots hold a fraction of what is sent."""

    def body(rank: Rank) -> None:
        for turn, count in enumerate((1, 64, 65, 1000, 5003)):
            for step in range(1, rank.n):
                after, before = (rank.rank + step) % rank.n, (rank.rank - step) % rank.n
                source = at(moved(rank.rank, count, torch.uint8), turn)
                output = at(torch.zeros_like(source), step)
                with ThreadPoolExecutor(1) as beside:
                    sent = beside.submit(rank.run, rank.plan.send(source.data_ptr(), count, after))
                    rank.run(rank.plan.recv(output.data_ptr(), count, before))
                    sent.result()
                assert torch.equal(output, moved(before, count, torch.uint8))

    run_threads(World(small_layout(4)), emulation, body)


def test_sends_that_fit_into_a_channel_need_no_receive(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        peer = 1 - rank.rank
        for turn in range(10):
            source = moved(rank.rank + turn, 256, torch.uint8)
            rank.run(rank.plan.send(source.data_ptr(), 256, peer))
            output = torch.zeros_like(source)
            rank.run(rank.plan.recv(output.data_ptr(), 256, peer))
            assert torch.equal(output, moved(peer + turn, 256, torch.uint8))

    run_threads(World(small_layout(2)), emulation, body)


def test_lanes_that_do_not_share_a_channel_evenly(emulation: Emulation) -> None:
    """Three for messages and five for collectives, all at once; each has its own slots."""
    limits = Limits(max_blocks=5, lanes=3, threads=16)
    count = 1500

    def body(rank: Rank) -> None:
        me, peer = rank.rank, 1 - rank.rank
        for turn in range(3):
            mine, theirs = (moved(each + turn, count, torch.uint8) for each in (me, peer))
            output, swapped = torch.zeros_like(theirs), torch.zeros(2 * count, dtype=torch.uint8)
            parts = [[moved(7 * a + b, count, torch.uint8) for b in range(2)] for a in range(2)]
            source, sizes = torch.cat(parts[me]), (count, count)
            to, given = swapped.data_ptr(), source.data_ptr()
            with ThreadPoolExecutor(2) as beside:
                futures = [
                    beside.submit(rank.run, rank.plan.send(mine.data_ptr(), count, peer)),
                    beside.submit(rank.run, rank.plan.all_to_all(to, given, sizes, sizes)),
                ]
                rank.run(rank.plan.recv(output.data_ptr(), count, peer))
                for future in futures:
                    future.result()
            assert torch.equal(output, theirs)
            assert torch.equal(swapped, torch.cat([parts[a][me] for a in range(2)]))

    layout = small_layout(2, channel_bytes=336)
    assert (layout.slot_bytes(3), layout.slot_bytes(5)) == (48, 32)
    run_threads(World(layout, limits=limits), emulation, body)


def test_a_message_is_not_taken_for_a_part_of_a_collective(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        peer = 1 - rank.rank
        message, part = moved(rank.rank, 64, torch.uint8), moved(rank.rank + 2, 64, torch.uint8)
        rank.run(rank.plan.send(message.data_ptr(), 64, peer))
        parts, output = torch.cat([part, part]), torch.zeros(128, dtype=torch.uint8)
        rank.run(rank.plan.all_to_all(output.data_ptr(), parts.data_ptr(), [64, 64], [64, 64]))
        assert torch.equal(output, torch.cat([moved(r + 2, 64, torch.uint8) for r in range(2)]))
        rank.run(rank.plan.recv(output.data_ptr(), 64, peer))
        assert torch.equal(output[:64], moved(peer, 64, torch.uint8))

    run_threads(World(small_layout(2)), emulation, body)


# --- sources in a table ------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("shift", [0, 4])
def test_sources_read_where_they_are(emulation: Emulation, n: int, shift: int) -> None:
    """More whole cells than a thread reads at a time, and a rest; or no whole cell."""
    count, dtype = 701, torch.float32
    sources = [at(wild(r, count, dtype), shift * (r % 2)) for r in range(n)]
    parts = [source.clone() for source in sources]
    table = torch.frombuffer(
        bytearray(abi.pack_sources([source.data_ptr() for source in sources])), dtype=torch.uint8
    )
    expected = in_rank_order(parts, ReduceOp.SUM)

    def body(rank: Rank) -> None:
        mine, where = sources[rank.rank], table.data_ptr()
        size = mine.nbytes
        for _ in range(3):
            whole = torch.zeros_like(mine)
            for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
                whole.zero_()
                arguments = whole.data_ptr(), mine.data_ptr(), size, dtype, ReduceOp.SUM
                rank.run(rank.plan.all_reduce(*arguments, algorithm=algorithm, table=where))
                same_numbers(whole, expected)
            row = torch.zeros(n * count)
            sizes = (size,) * n
            rank.run(rank.plan.all_gather(row.data_ptr(), mine.data_ptr(), sizes, table=where))
            same_numbers(row, torch.cat(parts))
            counts = [count // n + (count % n if r == 0 else 0) for r in range(n)]
            piece = torch.zeros(counts[rank.rank])
            to, given, sizes = piece.data_ptr(), mine.data_ptr(), [4 * c for c in counts]
            rank.run(rank.plan.reduce_scatter(to, given, sizes, dtype, ReduceOp.SUM, table=where))
            same_numbers(piece, expected.split(counts)[rank.rank])
            # Nobody reads it any more: it may be overwritten at once.
            mine.fill_(-1.0)
            rank.run(rank.plan.barrier())
            mine.copy_(parts[rank.rank])
        arguments = mine.data_ptr(), mine.data_ptr(), size, dtype, ReduceOp.SUM
        rank.run(rank.plan.all_reduce(*arguments, algorithm=Algorithm.TWO_SHOT, table=where))
        same_numbers(mine, expected)

    run_threads(World(small_layout(n)), emulation, body)


# --- epochs ------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2**31 - 3, NEAR_WRAP])
def test_every_launch_counts_once(emulation: Emulation, start: int) -> None:
    def body(rank: Rank) -> None:
        for _ in range(6):
            rank.run(rank.plan.barrier())
            number = torch.tensor([float(rank.rank + 1)])
            pointers = number.data_ptr(), number.data_ptr()
            rank.run(rank.plan.all_reduce(*pointers, 4, torch.float32, ReduceOp.SUM))
            assert number.item() == 3.0

    world = World(small_layout(2), start=start)
    run_threads(world, emulation, body)
    for rank in range(2):
        assert world.epoch(rank) == start + 6
        assert world.epoch(rank, abi.REGION_PACKET_EPOCH) == start + 6


def test_ranks_that_are_late_or_ahead(emulation: Emulation) -> None:
    """Stagings are used again and again; ranks come at different times, and rest in between."""

    def body(rank: Rank) -> None:
        order, late = random.Random(1), random.Random(rank.rank)
        for turn in range(150):
            count, root = order.randrange(1, 400), order.randrange(rank.n)
            kind = order.choice(("broadcast", *Algorithm))
            if late.random() < 0.1:
                time.sleep(late.random() / 200)
            parts = [values(r, (count,), torch.float32, turn) for r in range(rank.n)]
            mine = at(parts[rank.rank])
            pointer = mine.data_ptr()
            if isinstance(kind, Algorithm):
                size = min(mine.nbytes, 512)
                arguments = pointer, pointer, size, torch.float32, ReduceOp.SUM
                rank.run(rank.plan.all_reduce(*arguments, algorithm=kind))
                expected = reduced(parts, ReduceOp.SUM)
                assert torch.equal(mine[: size // 4], expected[: size // 4])
            else:
                rank.run(rank.plan.broadcast(pointer, mine.nbytes, root))
                assert torch.equal(mine, parts[root])

    run_threads(World(small_layout(4)), emulation, body)
