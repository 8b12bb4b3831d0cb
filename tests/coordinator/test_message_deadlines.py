"""Messages that do not come, or that nobody takes: what is left of the group at the deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages import incoming
from coordinator.messages.transport import OUTSTANDING_BYTES
from device_comm.shm.channel import EAGER_BYTES
from shm_broadcast import GroupAbortedError, GroupTimeoutError
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


def nothing_comes(rank: int, n: int, store: Store) -> None:
    with coordinator.init(pp=2, rank=rank, store=store, timeout=30) as groups:
        if rank == 0:
            pending = groups.pp.irecv_object(1)
            with pytest.raises(GroupTimeoutError):
                pending.wait(0.1)
            groups.pp.barrier()
            assert pending.wait() == "late"
            with pytest.raises(GroupTimeoutError, match="rank 1") as caught:
                groups.pp.recv_tensor_dict(timeout=0.3)
            assert [member.rank for member in caught.value.waiting_for] == [1]
        else:
            groups.pp.barrier()
            groups.pp.send_object("late", 0)
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.pp.recv_object(1 - rank)


def test_deadlines() -> None:
    """A handle may be waited for again; a blocking call that gave up ends the group."""
    run_ranks(2, nothing_comes, SharedStore())


def send_again_and_again(group: GroupCoordinator, x: torch.Tensor) -> None:
    for _ in range(4):
        group.send(x, 1, timeout=0.3)


def nobody_takes_it(rank: int, n: int, store: Store, torch_only: bool) -> None:
    """What a blocking call has passed on when its time is up ends the group on both ends."""
    with coordinator.init(
        pp=2, rank=rank, store=store, timeout=30, torch_only=torch_only
    ) as groups:
        if rank == 0:
            x = torch.zeros(OUTSTANDING_BYTES + EAGER_BYTES, dtype=torch.uint8)
            with pytest.raises(GroupTimeoutError):
                send_again_and_again(groups.pp, x)
            store.set("gave up", "")
        else:
            store.get("gave up")
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.pp.recv_object(1 - rank)


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
def test_a_send_that_gives_up_ends_the_group(torch_only: bool) -> None:
    run_ranks(2, nobody_takes_it, SharedStore(), torch_only)


def one_stalls(rank: int, n: int, store: Store) -> None:
    allocate = incoming.allocate

    def stall(*what: Any) -> Any:
        store.get("gave up")
        return allocate(*what)

    with coordinator.init(tp=2, rank=rank, store=store, timeout=30, torch_only=True) as groups:
        if rank == 0:
            two = {"x": torch.ones(2 << 20), "y": torch.ones(2 << 20)}
            with pytest.raises(GroupTimeoutError):
                groups.tp.broadcast_tensor_dict(two, timeout=1)
            store.set("gave up", "")
        else:
            with (
                patch.object(incoming, "allocate", stall),
                pytest.raises(GroupAbortedError, match="GroupTimeoutError"),
            ):
                groups.tp.broadcast_tensor_dict()
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError"):
            groups.tp.barrier()


def test_a_broadcast_that_gives_up_ends_the_group() -> None:
    """Also where several tensors are under way at once."""
    run_ranks(2, one_stalls, SharedStore())
