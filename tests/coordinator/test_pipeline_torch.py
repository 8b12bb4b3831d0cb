"""torch's own pipeline schedules run over a group's process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordinator
from tests.ranks import init_gloo, run_ranks

BATCHES = 5


def model(parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(parts)]


def over_a_group(rank: int, n: int, path: str, name: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 3 * BATCHES, 6, dtype=torch.float64)
    whole = nn.Sequential(*model(n))
    nn.functional.mse_loss(whole(inputs), targets).backward()

    part = model(n)[rank]
    with coordinator.GroupCoordinator.from_process_group(init_gloo(rank, n, path), "pp") as pp:
        stage = pipelining.PipelineStage(part, rank, n, pp.device, group=pp.device_group)
        schedule = getattr(pipelining, name)(
            stage, n_microbatches=BATCHES, loss_fn=nn.functional.mse_loss
        )
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        pp.barrier(timeout=120)
    for mine, theirs in zip(part.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_the_gradients_of_the_undivided_model(name: str, store_path: str) -> None:
    run_ranks(2, over_a_group, store_path, name, timeout=120)
