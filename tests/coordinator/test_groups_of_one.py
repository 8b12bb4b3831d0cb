"""Groups of one: their process groups hold their only member and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import coordinator
from coordinator import GroupCoordinator, ParallelGroups
from shm_broadcast import GroupClosedError
from tests.ranks import init_gloo, run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


def join(rank: int, n: int, store: Store) -> ParallelGroups:
    return coordinator.init(pp=n, rank=rank, world_size=n, store=store, timeout=30)


def torch_in_each_group_of_one(rank: int, n: int, store: Store, path: str) -> None:
    init_gloo(rank, n, path)  # what torch takes for WORLD is there, and is not used
    with join(rank, n, store) as groups:
        assert groups.tp.world_size == groups.dp.world_size == 1
        for group in (groups.tp, groups.dp):
            for made in (group.device_group, group.cpu_group):
                x = torch.tensor([rank + 1.0])
                dist.all_reduce(x, group=made)
                assert x.item() == rank + 1.0
                dist.broadcast(x, src=rank, group=made)
                dist.barrier(made)
                assert (made.size(), made.rank()) == (1, 0)
                assert dist.get_process_group_ranks(made) == [rank]
                assert dist.get_world_size(made) == 1
            assert group.cpu_group is group.cpu_group
        assert groups.tp.cpu_group is not groups.dp.cpu_group
        mesh = DeviceMesh.from_group(groups.tp.device_group, "cpu", mesh_dim_names=("tp",))
        assert mesh.size() == 1
        over_both = torch.tensor([rank + 1.0])
        dist.all_reduce(over_both, group=groups.pp.device_group)
        assert over_both.item() == 3.0


def test_a_sum_in_a_group_of_one_is_over_its_member(store_path: str) -> None:
    run_ranks(2, torch_in_each_group_of_one, SharedStore(), store_path)


def in_a_default_group(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    alone = GroupCoordinator([[0], [1]], rank, "gloo", True, group_name="tp")
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=alone.device_group)
    sibling = alone.make_sibling_device_group("beside")
    dist.all_reduce(x, group=sibling)
    assert x.item() == rank + 1.0
    assert sibling is not alone.device_group
    kept = alone.device_group
    alone.close()
    with pytest.raises(KeyError):  # torch has forgotten it
        dist.get_process_group_ranks(kept)
    with pytest.raises(GroupClosedError, match="tp is closed"):
        _ = alone.cpu_group
    with pytest.raises(GroupClosedError, match="tp is closed"):
        alone.make_sibling_device_group("late")


def test_they_are_torchs_until_the_group_is_closed(store_path: str) -> None:
    run_ranks(2, in_a_default_group, store_path)


def test_a_wrapped_group_of_one_is_the_given_one(store_path: str) -> None:
    given = init_gloo(0, 1, store_path)
    try:
        with GroupCoordinator.from_process_group(given) as group:
            assert group.cpu_group is group.device_group is given
        assert dist.get_process_group_ranks(given) == [0]
    finally:
        dist.destroy_process_group()


def test_they_cost_nothing_until_they_are_asked_for() -> None:
    before = _open_files()
    with coordinator.init() as groups:
        assert groups.tp.all_reduce(torch.ones(1)).item() == 1.0
        assert not _open_files() - before
        assert groups.tp.device_group.size() == 1
        assert _open_files() - before


def _open_files() -> set[str]:
    return {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()}
