"""A process that a rank forks, as data loaders do, is not that rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import host_store
from shm_broadcast import GroupClosedError
from shm_broadcast.board.forked_child import DISOWNED
from tests.forked import in_a_child
from tests.patience import all_here
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from device_comm import Work


def pretend(groups: coordinator.ParallelGroups, under_way: Work[Any]) -> None:
    """What a child must not take part in, whichever way it tries."""
    tp, x = groups.tp, torch.ones(4)
    under_way.is_completed()
    for call in (
        lambda: tp.all_reduce(x),
        lambda: tp.all_reduce(x, async_op=True),
        lambda: tp.barrier(),
        lambda: tp.send(x, 1),
        lambda: tp.isend_tensor_dict({"x": x}, 1),
        lambda: tp.broadcast_object("a child's"),
        lambda: tp.abort("a child's"),
        under_way.wait,
    ):
        with pytest.raises(GroupClosedError, match=DISOWNED):
            call()
    groups.close()


def fork(rank: int, n: int, port: int, torch_only: bool) -> list[float]:
    store = coordinator.connect_store("127.0.0.1", port)
    with coordinator.init(tp=n, rank=rank, store=store, torch_only=torch_only) as groups:
        tp, x = groups.tp, torch.full((4,), float(rank))
        sums = [tp.all_reduce(x)[0].item()]
        tp.send(x, 1) if rank == 0 else tp.recv(x.shape, x.dtype, 0)
        under_way = tp.irecv(x.shape, x.dtype, 1) if rank == 0 else tp.isend(x + 2, 0)
        all_here(store, n)
        if rank == 0:
            in_a_child(lambda: pretend(groups, under_way))
            sums.append(under_way.wait()[0].item())
        sums += [tp.all_reduce(x)[0].item(), tp.broadcast_object(rank if rank == 0 else None)]
        tp.send(x + 5, 1) if rank == 0 else sums.append(tp.recv(x.shape, x.dtype, 0)[0].item())
        tp.barrier()
        return sums


@pytest.mark.parametrize("torch_only", [False, True], ids=["shared memory", "torch"])
def test_a_child_takes_no_part_and_its_parent_goes_on(torch_only: bool) -> None:
    store = host_store()
    assert run_ranks(2, fork, store.port, torch_only) == [[1, 3, 1, 0], [1, 1, 0, 5]]
