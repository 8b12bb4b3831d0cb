"""A process that a rank forks, as data loaders do, is not that rank."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from shm_broadcast import GroupClosedError
from shm_broadcast.process import IN_FORKED_CHILD
from tests.forked import in_a_child
from tests.patience import all_here, until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

    from device_comm import Work


def meddle(under_way: Work[Any], folder: Path) -> None:
    """Look at an operation of the parent, which cannot go on with it meanwhile."""
    os.kill(os.getppid(), signal.SIGSTOP)
    try:
        (folder / "stopped").touch()
        until((folder / "sent").exists, "rank 1 has sent nothing")
        under_way.is_completed()
        with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
            under_way.wait()
    finally:
        os.kill(os.getppid(), signal.SIGCONT)


def pretend(groups: coordinator.ParallelGroups) -> None:
    """What a child must not take part in, whichever way it tries."""
    tp, x = groups.tp, torch.ones(4)
    for call in (
        lambda: tp.all_reduce(x),
        lambda: tp.all_reduce(x, async_op=True),
        lambda: tp.barrier(),
        lambda: tp.send(x, 1),
        lambda: tp.isend_tensor_dict({"x": x}, 1),
        lambda: tp.broadcast_object("a child's"),
        lambda: tp.abort("a child's"),
    ):
        with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
            call()
    groups.close()


def fork(rank: int, n: int, store: Store, folder: Path, torch_only: bool) -> list[float]:
    with coordinator.init(tp=n, rank=rank, store=store, torch_only=torch_only) as groups:
        tp, x = groups.tp, torch.full((4,), float(rank))
        sums = [tp.all_reduce(x)[0].item()]
        tp.send(x, 1) if rank == 0 else tp.recv(x.shape, x.dtype, 0)
        all_here(store, n)
        if rank == 0:
            under_way = tp.irecv(x.shape, x.dtype, 1)
            in_a_child(lambda: meddle(under_way, folder))
            in_a_child(lambda: pretend(groups))
            found = under_way.wait()
            assert found is not None
            sums.append(found[0].item())
        else:
            until((folder / "stopped").exists, "rank 0 has forked no child")
            sent = tp.isend(x + 2, 0)
            (folder / "sent").touch()
            sent.wait()
        sums += [tp.all_reduce(x)[0].item(), tp.broadcast_object(rank if rank == 0 else None)]
        tp.send(x + 5, 1) if rank == 0 else sums.append(tp.recv(x.shape, x.dtype, 0)[0].item())
        tp.barrier()
        return sums


@pytest.mark.parametrize("torch_only", [False, True], ids=["shared memory", "torch"])
def test_a_child_takes_no_part_and_its_parent_goes_on(torch_only: bool, tmp_path: Path) -> None:
    assert run_ranks(2, fork, SharedStore(), tmp_path, torch_only) == [[1, 3, 1, 0], [1, 1, 0, 5]]
