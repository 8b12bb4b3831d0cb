"""What a profiler shows of operations, and that they are as they were without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from shm_broadcast import Board, BoardHandle
from tests.device_comm.shm_ranks import make_comm
from tests.pages.blocks import block_of
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from device_comm import Communicator

N = 2


def use(comm: Communicator) -> list[torch.Tensor]:
    x = torch.arange(1024.0) + comm.rank
    reduced = [comm.all_reduce(x), comm.all_reduce_(x.clone()), comm.all_reduce(x.view(32, 32).T)]
    begun = comm.all_gather(x, async_op=True)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        reduced.append(comm.recv(1024, torch.float32, 0))
    comm.barrier()
    return [*reduced, begun.wait()]


def profiled(rank: int, n: int, board: BoardHandle, path: str) -> dict[str, int]:
    with make_comm(rank, board, path) as comm:
        plain = use(comm)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            shown = use(comm)
        assert all(torch.equal(a, b) for a, b in zip(plain, shown, strict=True))
        again = use(comm)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    counts = {each.key: each.count for each in recorded.key_averages()}
    return {key: count for key, count in counts.items() if key.startswith("group-coordinator")}


def test_each_operation_is_a_range(tmp_path: Path) -> None:
    documented = {*block_of("docs/debugging.md", "group-coordinator all_reduce tp").splitlines()}
    with Board.create(N, None) as board:
        counts = run_ranks(N, profiled, board.handle(), str(tmp_path / "group"))
        for rank, ranges in enumerate(counts):
            assert ranges == {
                "group-coordinator all_reduce tp 4096 B": 3,
                "group-coordinator all_gather tp 4096 B": 1,
                f"group-coordinator {('send', 'recv')[rank]} tp 4096 B": 1,
                "group-coordinator barrier tp 0 B": 1,
            }
            assert documented <= ranges.keys()
            past = board.recorded(rank)
            assert len(past) == 3 * 6
            assert {each.outcome for each in past} == {"done"}
