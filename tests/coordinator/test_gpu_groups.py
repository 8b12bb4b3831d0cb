"""Groups on CUDA devices: what is chosen, verbs, captures of a whole group."""

from __future__ import annotations

import pytest
import torch

from coordinator import init
from tests.gpus import own_device
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


def grouped(rank: int, n: int, path: str, cache: str) -> str:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    device = own_device(rank)
    store = torch.distributed.FileStore(path, n)  # type: ignore[attr-defined]
    with init(tp=n, rank=rank, world_size=n, local_rank=rank, store=store) as groups:
        tp = groups.tp
        assert tp.device == device
        for count in (3, 5_000, 2_000_000):
            x = torch.full((count,), rank + 1.0, device=device, dtype=torch.bfloat16)
            assert tp.all_reduce(x).unique().tolist() == [n * (n + 1) / 2]
            assert tp.broadcast(x, src=n - 1).unique().tolist() == [n]
        x = torch.zeros(5_000, device=device)
        graph = torch.cuda.CUDAGraph()
        with tp.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
            y = tp.all_reduce(x)
        for turn in range(20):
            x.fill_(turn + rank)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert y.unique().tolist() == [n * turn + n * (n - 1) / 2]
        del graph
        tp.send_tensor_dict({"a": x, "n": 3}, dst=(rank + 1) % n) if rank == 0 else None
        if rank == 1:
            assert tp.recv_tensor_dict(src=0)["n"] == 3
        return str(tp.explain())


def test_a_group_that_shares_a_device(store_path: str, tmp_path: object) -> None:
    told = run_ranks(2, grouped, store_path, str(tmp_path), timeout=180)
    assert told[0] == told[1]
    print(told[0])  # noqa: T201 - for the report
    if torch.cuda.device_count() == 1:
        assert "not used: nccl: rank 0: 2 members share 1 device" in told[0]
