"""Emulated ranks that are processes: each maps the regions where it likes."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import Algorithm, ErrorCode, RegionLayout
from tests.device_comm.cuda.emulated_world import Rank, World, moved, small_layout
from tests.device_comm.cuda.emulator import Emulation
from tests.device_comm.oracle import reduced, values
from tests.patience import until
from tests.ranks import run_ranks


def prepare(folder: Path, layout: RegionLayout) -> str:
    """The regions of a group in a file, before the first launch."""
    path = folder / "regions"
    World(layout, path=path)
    return str(path)


def enter(rank: int, n: int, path: str, library: str, timeout: float) -> Rank:
    world = World(small_layout(n), path=Path(path), fresh=False, timeout=timeout)
    return Rank(world, rank, Emulation(Path(library)))


def collectives(me: Rank, turns: int) -> None:
    order, late = random.Random(me.n), random.Random(me.rank)
    for turn in range(turns):
        kind = order.choice((*Algorithm, "all_gather", "broadcast"))
        count, root = order.randrange(1, 120), order.randrange(me.n)
        if late.random() < 0.2:
            time.sleep(late.random() / 500)
        parts = [values(r, (count,), torch.float32, turn) for r in range(me.n)]
        mine = parts[me.rank].clone()
        pointer, size = mine.data_ptr(), mine.nbytes
        if isinstance(kind, Algorithm):
            arguments = pointer, pointer, size, torch.float32, ReduceOp.SUM
            me.run(me.plan.all_reduce(*arguments, algorithm=kind))
            assert torch.equal(mine, reduced(parts, ReduceOp.SUM)), (turn, kind)
        elif kind == "broadcast":
            me.run(me.plan.broadcast(pointer, size, root))
            assert torch.equal(mine, parts[root]), (turn, kind)
        else:
            row = torch.zeros(me.n * count)
            me.run(me.plan.all_gather(row.data_ptr(), pointer, (size,) * me.n))
            assert torch.equal(row, torch.cat(parts)), (turn, kind)


def messages(me: Rank, turns: int) -> None:
    """A ring, all at once with collectives."""
    order, after, before = random.Random(7), (me.rank + 1) % me.n, (me.rank - 1) % me.n
    for turn in range(turns):
        count = order.randrange(1, 2000)
        source = moved(me.rank, count + turn, torch.uint8)
        output = torch.zeros_like(source)
        with ThreadPoolExecutor(1) as beside:
            sent = beside.submit(me.run, me.plan.send(source.data_ptr(), source.nbytes, after))
            me.run(me.plan.recv(output.data_ptr(), output.nbytes, before))
            sent.result()
        assert torch.equal(output, moved(before, count + turn, torch.uint8))


def everything(rank: int, n: int, path: str, library: str, turns: int) -> None:
    me = enter(rank, n, path, library, timeout=60.0)
    with ThreadPoolExecutor(1) as beside:
        ring = beside.submit(messages, me, turns // 4)
        collectives(me, turns)
        ring.result()


@pytest.mark.parametrize("n", [2, 4, 8])
def test_collectives_beside_messages(tmp_path: Path, emulation_library: Path, n: int) -> None:
    path = prepare(tmp_path, small_layout(n))
    run_ranks(n, everything, path, str(emulation_library), 240 // n, timeout=90.0)


def until_one_dies(rank: int, n: int, path: str, library: str) -> tuple[ErrorCode, int]:
    me = enter(rank, n, path, library, timeout=60.0)
    collectives(me, 10)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:  # its time is over first, and rank 2 has come by then
        (barrier,) = me.plan.barrier()
        until(lambda: me.world.has_come(2, barrier.grid, 0))
        me = enter(rank, n, path, library, timeout=0.5)
    me.attempt(me.plan.barrier())
    record = me.world.record(rank)
    return record.code, record.culprit


def test_a_rank_that_is_killed_is_named(tmp_path: Path, emulation_library: Path) -> None:
    path = prepare(tmp_path, small_layout(3))
    results = run_ranks(3, until_one_dies, path, str(emulation_library), timeout=60.0, may_die={1})
    codes = {code for code, _ in (results[0], results[2])}
    assert ErrorCode.TIMEOUT in codes and codes <= {ErrorCode.TIMEOUT, ErrorCode.PEER}
    assert [culprit for _, culprit in (results[0], results[2])] == [1, 1]
