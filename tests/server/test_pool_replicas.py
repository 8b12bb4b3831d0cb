"""A pool with replicas: each computes every call, and no result is thrown away."""

from __future__ import annotations

import pytest

from server.pool import WorkerPool
from tests.server.workers import Worker


def test_replicas_give_each_their_result_and_none_alone() -> None:
    with WorkerPool(Worker, dp=2) as pool:
        assert [rank for rank, _ in pool.collective_rpc("where", timeout=30)] == [0, 1]
        assert pool.collective_rpc("where", 30, unique_reply_rank=1)[0] == 1
        for refused in (pool.call, pool.submit):
            with pytest.raises(ValueError, match="each of dp=2 replicas computes one"):
                refused("where")
