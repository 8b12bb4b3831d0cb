"""Groups over three hosts of one, two and three ranks, none of which are neighbours."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from shm_broadcast import PeerLostError
from tests.coordinator.hosts import NAMES, move_to
from tests.netns import hosts_on_a_switch
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from coordinator import GroupCoordinator
    from tests.netns import Host

pytestmark = pytest.mark.namespaces

PLACES = (2, 1, 0, 2, 1, 2)
"""On which host each rank is."""
PORT = 29400
SECRET = b"known to all three hosts, and to no one else"
VICTIM = 4


def over_three(
    rank: int, n: int, folder: str, hosts: Sequence[Host], secret: bytes | None, dies: bool
) -> Any:
    move_to(folder, hosts, PLACES[rank])
    with coordinator.init(
        tp=n,
        rank=rank,
        local_rank=PLACES[:rank].count(PLACES[rank]),
        master_addr=hosts[PLACES[0]].address,
        master_port=PORT,
        timeout=PATIENCE_SECONDS,
        secret=secret,
    ) as groups:
        return loses_one(groups.tp) if dies else moves(groups.tp)


def moves(tp: GroupCoordinator) -> dict[str, Any]:
    """What comes of tensors and objects that tell their rank."""
    rank, n = tp.rank, tp.world_size
    mine = torch.full((2,), float(rank))
    after, before = (rank + 1) % n, (rank - 1) % n
    found: dict[str, Any] = {
        # 0 + 1 + 2 + 3 + 4 + 5, in a few bytes, and in many
        "sums": [tp.all_reduce(torch.full((size,), float(rank))).unique() for size in (3, 1 << 20)],
        "gathered": tp.all_gather(mine),
        "scattered": tp.reduce_scatter(torch.arange(2.0 * n)),
        "exchanged": tp.all_to_all(torch.arange(float(n)) + 10 * rank),
        "objects": tp.all_gather_object({"rank": rank}),
        "object": tp.broadcast_object("of 1" if rank == 1 else None, src=1),
        "dict": tp.broadcast_tensor_dict({"x": mine} if rank == 2 else None, src=2)["x"],
    }
    work = tp.isend(mine, after)
    found["received"] = tp.recv((2,), torch.float32, before)
    work.wait()
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def loses_one(tp: GroupCoordinator) -> str:
    tp.barrier()
    if tp.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        tp.all_reduce(torch.ones(1000))
    assert caught.value.rank == VICTIM
    return str(caught.value)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_all_that_moves_arrives(secret: bytes | None, tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        results = run_ranks(6, over_three, str(tmp_path), hosts, secret, False)
    for rank, found in enumerate(results):
        assert found == {
            "sums": [[15.0], [15.0]],
            "gathered": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0],
            "scattered": [12.0 * rank, 12.0 * rank + 6],
            "exchanged": [10.0 * other + rank for other in range(6)],
            "objects": [{"rank": other} for other in range(6)],
            "object": "of 1",
            "dict": [2.0, 2.0],
            "received": [float((rank - 1) % 6)] * 2,
        }


def test_a_rank_that_is_killed_is_named_on_all_three(tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        told = run_ranks(6, over_three, str(tmp_path), hosts, SECRET, True, may_die=[VICTIM])
    there = f" on {NAMES[PLACES[VICTIM]]}"
    for rank, text in enumerate(told):
        if rank != VICTIM:
            assert f"lost rank {VICTIM} (pid " in text
            assert (there in text) == (PLACES[rank] != PLACES[VICTIM])
