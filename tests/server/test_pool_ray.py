"""A pool on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from benchmarks.http_served import Served
from server.config import PoolConfig
from server.errors import HostError, WorkerLostError, WorkerStartError
from server.launchers.ray_cluster import RayCluster
from server.pool import WorkerPool
from server.workers.minilm import packaged_model
from tests.patience import PATIENCE_SECONDS, until
from tests.server.served import embed
from tests.server.tiny_bert import reference
from tests.server.workers import Restored, Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

START_SECONDS = 120.0
LINES = ["The harbour wakes before the sun does.", "", "short", "Ünïcödé ✓"]
PATIENT = RayCluster(silence_seconds=7.0)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster whose head has no CPU, with two nodes of two."""
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [made.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=made.address, log_to_driver=False)
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


def pool_of(worker: type | str, **options: Any) -> WorkerPool:
    given = {"tp": 2, "pp": 2, "start_timeout": START_SECONDS, "hosts": PATIENT, **options}
    config = PoolConfig(leave_seconds=PATIENCE_SECONDS)
    return WorkerPool(worker, launcher="ray", config=config, **given)


def test_a_stage_runs_on_each_node_and_a_lost_node_is_a_lost_worker(cluster: Any) -> None:
    made, nodes = cluster
    with pool_of(Worker) as pool:
        assert pool.collective_rpc("total", args=(1.0,)) == [4.0] * 4
        assert [rank for rank, _ in pool.collective_rpc("where")] == [0, 1, 2, 3]
        assert list(pool.stream("count", 3)) == [0, 1, 2]
        call = pool.submit("hang_in_group", 3)
        until(lambda: all(each.state == "busy" for each in pool.status()))
        made.remove_node(nodes[1], allow_graceful=False)
        with pytest.raises(WorkerLostError):
            call.result(PATIENCE_SECONDS)
    assert ray.util.placement_group_table() == {} or all(
        each["state"] == "REMOVED" for each in ray.util.placement_group_table().values()
    )


def test_a_killed_worker_and_a_killed_task_are_replaced(cluster: Any) -> None:
    del cluster
    with pool_of(Restored, restart="worker") as pool:
        before = pids_of(pool)
        os.kill(before[3], signal.SIGKILL)
        until(lambda: pool.generation == 2)
        assert pool.call("total", 1.0) == 4.0
        assert pool.collective_rpc("holds")[:3] == [["made in 1", "restored in 2"]] * 3
        os.kill(task_of(pool.collective_rpc("where")[0][1]), signal.SIGKILL)
        until(lambda: pool.generation == 3)
        assert pool.call("total", 1.0) == 4.0
        assert pool.collective_rpc("holds")[2][-1] == "restored in 3"
        assert pool.collective_rpc("holds")[0] == ["made in 3"]


def test_minilm_is_served_by_two_nodes(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = cluster
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    expected = reference(packaged_model(), LINES)
    with Served("--launcher", "ray", "--tp", "2", "--pp", "2") as served:
        served.wait_until_ready(START_SECONDS)
        found = [each["embedding"] for each in embed(served, LINES).json()["data"]]
        served.process.send_signal(signal.SIGTERM)
        assert served.finish()[0] == 0
    np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=1e-5)


def task_of(worker: int) -> int:
    """The process that has started a worker: its reaper's parent."""
    return psutil.Process(worker).parent().parent().pid


def test_what_cannot_be_is_said(cluster: Any) -> None:
    del cluster
    with pytest.raises(HostError, match=r"no room for 2 x \{'CPU': 8.0\} in 2 s"):
        pool_of(Worker, tp=8, start_timeout=2.0)
    with pytest.raises(ValueError, match="launcher must be 'ray'"):
        WorkerPool(Worker, hosts=RayCluster())
    with pytest.raises(WorkerStartError, match="No module named 'no_such_module'"):
        pool_of("no_such_module:Worker")
