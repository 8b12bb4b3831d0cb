"""Groups on CUDA devices: which backends are chosen, and graphs of all groups at once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch

import coordinator
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

pytestmark = pytest.mark.gpu

if TYPE_CHECKING:
    from torch.distributed import Store


def use_groups(rank: int, n: int, store: Store) -> str:
    warnings.simplefilter("ignore")  # of the libraries, about the machine
    with coordinator.init(
        tp=2, pp=n // 2, rank=rank, world_size=n, store=store, backend="nccl", timeout=120
    ) as groups:
        assert groups.device.type == "cuda"
        x = torch.full((100_000,), float(rank), device=groups.device)
        assert groups.tp.all_reduce(x)[-1] == sum(groups.tp.ranks)
        graph = torch.cuda.CUDAGraph()
        with groups.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
            total = groups.world.all_reduce(groups.tp.all_reduce(x))
        for turn in range(10):
            x.fill_(rank + turn)
            graph.replay()
            assert total[0] == 2 * (n * turn + n * (n - 1) / 2)
        if groups.pp.world_size > 1 and groups.pp.is_first_rank:
            groups.pp.isend_tensor_dict({"x": x}).wait()
        elif groups.pp.world_size > 1:
            assert groups.pp.recv_tensor_dict()["x"][0] == groups.pp.first_rank + 9
        groups.world.barrier()
        return str(groups.tp.explain())


@pytest.mark.parametrize("n", [2, 4])
def test_groups_whose_ranks_share_devices(n: int) -> None:
    for text in run_ranks(n, use_groups, SharedStore(), timeout=300):
        assert "ipc" in text
