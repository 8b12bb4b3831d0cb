"""A pool whose grid has axes of its own, and the ones for context parallelism."""

from __future__ import annotations

import os
import signal
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import torch

from server.pool import WorkerPool
from server.replicas import Replicas
from tests.netns import two_hosts
from tests.patience import until
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from server.worker import WorkerContext


class Placed:
    def __init__(self, context: WorkerContext) -> None:
        self.groups = context.groups

    def restore(self, context: WorkerContext) -> None:
        self.groups = context.groups

    def rank(self) -> int:
        return self.groups.rank

    def members(self) -> dict[str, list[int]]:
        """The ranks of each group, summed up by a collective in it beside."""
        groups = {name: getattr(self.groups, name) for name in ("tp", "pcp", "dcp", "pp", "dp")}
        found = {}
        for name, group in {**groups, **self.groups.axes}.items():
            found[name] = group.ranks
            mine = torch.tensor([float(self.groups.rank)])
            assert group.all_reduce(mine).item() == sum(group.ranks)
        return found


CFG = [
    {"cfg": [0, 4], "pcp": [0, 2], "tp": [0, 1], "dcp": [0, 2]},
    {"cfg": [1, 5], "pcp": [1, 3], "tp": [0, 1], "dcp": [1, 3]},
    {"cfg": [2, 6], "pcp": [0, 2], "tp": [2, 3], "dcp": [0, 2]},
    {"cfg": [3, 7], "pcp": [1, 3], "tp": [2, 3], "dcp": [1, 3]},
    {"cfg": [0, 4], "pcp": [4, 6], "tp": [4, 5], "dcp": [4, 6]},
    {"cfg": [1, 5], "pcp": [5, 7], "tp": [4, 5], "dcp": [5, 7]},
    {"cfg": [2, 6], "pcp": [4, 6], "tp": [6, 7], "dcp": [4, 6]},
    {"cfg": [3, 7], "pcp": [5, 7], "tp": [6, 7], "dcp": [5, 7]},
]
"""Of ``axes={"cfg": 2}, pcp=2, dcp=2, tp=2``, worked out by hand: rank = (cfg * 2 + pcp) * 2 + tp;
ranks that share contexts are counted with pcp fastest."""


def found_in(pool: WorkerPool) -> list[dict[str, list[int]]]:
    found = pool.collective_rpc("members")
    for rank, groups in enumerate(found):
        assert groups.pop("pp") == groups.pop("dp") == [rank]
    return found


def test_workers_have_the_groups_of_all_axes_also_after_a_restart() -> None:
    with WorkerPool(Placed, axes={"cfg": 2}, pcp=2, dcp=2, tp=2, restart="worker") as pool:
        assert repr(pool).endswith("test_pool_grid:Placed, cfg=2 x dp=1 x pp=1 x pcp=2 x tp=2)")
        assert found_in(pool) == CFG
        pid = pool.status()[5].pid
        assert (
            psutil.Process(pid).cmdline()[0].startswith("group-coordinator worker 5 cfg1 pcp0 tp1")
        )
        os.kill(pid, signal.SIGKILL)
        until(lambda: pool.generation == 2 and pool.restarting is None)
        assert found_in(pool) == CFG


def test_any_mapping_names_axes_by_any_printable_text_with_sizes_of_numpy() -> None:
    axes = MappingProxyType({"rank": 1, "größe {0}": np.int64(2), "all": np.int32(1)})
    with WorkerPool(Placed, axes=axes) as pool:
        assert pool.grid.own_axes == {"rank": 1, "größe {0}": 2, "all": 1}
        members = pool.collective_rpc("members")
        assert [each["größe {0}"] for each in members] == [[0, 1]] * 2
        assert [each["rank"] for each in members] == [[0], [1]]
        assert [each["all"] for each in members] == [[0], [1]]


def test_one_result_is_that_of_the_first_rank_of_the_last_stage() -> None:
    with WorkerPool(Placed, axes={"cfg": 2}, pp=2) as pool:
        assert pool.call("rank") == 1
        assert pool.grid.coordinates(1) == {"cfg": 0, "dp": 0, "pp": 1, "pcp": 0, "tp": 0}


def test_each_replica_has_the_axes_and_ranks_are_counted_replica_by_replica() -> None:
    with Replicas(Placed, dp=2, axes={"cfg": 2}) as replicas:
        assert [found_in(pool) for pool in replicas.pools] == [
            [{"cfg": [0, 1], "pcp": [rank], "tp": [rank], "dcp": [rank]} for rank in range(2)]
        ] * 2
        assert replicas.grid.coordinates(3)["cfg"] == replicas.grid.coordinates(3)["dp"] == 1
        assert replicas.grid.coordinates(2)["cfg"] == 0


@pytest.mark.namespaces
def test_an_axis_of_ones_own_lies_between_hosts(tmp_path: Path) -> None:
    options = {"worker": Placed, "axes": {"cfg": 2}, "tp": 2}
    with two_hosts("IPv4") as hosts:
        found, end = run_ranks(2, over_hosts, str(tmp_path), hosts, found_in, (), options)
    assert [each["cfg"] for each in found] == [[0, 2], [1, 3]] * 2
    assert end[0] == "dismissed"
