"""Two threads that call collectives of one group at once: it ends, and says why.

What they call before they meet may be mixed up: nobody can tell whose call comes first elsewhere.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator
from shm_broadcast import CoordinatorError
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

CALLS: dict[str, Callable[[GroupCoordinator, int], Any]] = {
    "all_reduce": lambda group, given: group.all_reduce(torch.full((2000,), given)),
    "all_reduce of large tensors": lambda group, given: group.all_reduce(
        torch.full((900_000,), given)
    ),
    "objects": lambda group, given: group.all_gather_object(given),
    "dict": lambda group, given: group.broadcast_tensor_dict(
        {"is": given, "x": torch.ones(9999)} if group.rank_in_group == 0 else None
    ),
}


def both(rank: int, n: int, store: Store, call: str, torch_only: bool) -> list[str]:
    """Each thread calls with a number of its own; what they have raised."""
    raised: list[str] = []
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30, torch_only=torch_only) as found:
        found.tp.barrier()

        def repeat(given: int) -> None:
            try:
                while True:
                    CALLS[call](found.tp, given)
            except (RuntimeError, CoordinatorError) as error:
                raised.append(str(error))

        threads = [threading.Thread(target=repeat, args=(given,)) for given in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return raised


@pytest.mark.parametrize("torch_only", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_group_ends_and_says_why(call: str, torch_only: bool) -> None:
    for raised in run_ranks(2, both, SharedStore(), call, torch_only):
        assert len(raised) == 2
        if call.startswith("all_reduce"):  # the others are of several parts, which may differ
            assert all("another thread is in a call of this group" in each for each in raised)
