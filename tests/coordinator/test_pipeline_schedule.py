"""Schedules on real stages, against the undivided model and against torch's own schedules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import coordinator
from coordinator.pipeline import Order, Schedule, Stage, gpipe, one_f_one_b
from shm_broadcast import GroupAbortedError
from tests.patience import all_here
from tests.ranks import init_gloo, run_ranks

BATCHES = 5


def model(parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(parts)]


def data() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    return (
        [torch.randn(3, 6, dtype=torch.float64) for _ in range(BATCHES)],
        [torch.randn(3, 6, dtype=torch.float64) for _ in range(BATCHES)],
    )


def dense(parts: int) -> tuple[list[nn.Module], list[torch.Tensor], list[torch.Tensor]]:
    """The undivided model: its parts with gradients, its outputs and its losses."""
    layers = model(parts)
    inputs, targets = data()
    outputs = [nn.Sequential(*layers)(x) for x in inputs]
    losses = [
        nn.functional.mse_loss(out, target) for out, target in zip(outputs, targets, strict=True)
    ]
    (sum(losses) / BATCHES).backward()
    return layers, outputs, losses


def trains_as_the_undivided_model(groups: coordinator.ParallelGroups, order: Order) -> None:
    pp = groups.pp
    layers, outputs, losses = dense(pp.world_size)
    part = model(pp.world_size)[pp.rank_in_group]
    inputs, targets = data()
    schedule = Schedule(Stage(pp, groups.tp), part, order=order)
    found = schedule.train(
        inputs if pp.is_first_rank else None,
        BATCHES,
        (lambda out, number: nn.functional.mse_loss(out, targets[number]))
        if pp.is_last_rank
        else None,
    )
    for mine, theirs in zip(part.parameters(), layers[pp.rank_in_group].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    if pp.is_last_rank:
        assert found is not None
        torch.testing.assert_close(found, [each.detach() for each in losses])
    else:
        assert found is None
    answers = schedule.infer(inputs, BATCHES)
    if pp.is_last_rank:
        assert answers is not None
        assert not answers[0].requires_grad
        torch.testing.assert_close(answers, [each.detach() for each in outputs])


def trees_with_integers_pass(groups: coordinator.ParallelGroups) -> None:
    """A mask that has no gradient goes along; a value that is no tensor, too."""
    pp = groups.pp
    weight = torch.full((2,), 2.0, requires_grad=True)

    def part(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "x": tree["x"] * weight, "steps": tree["steps"] + 1}

    inputs = [
        {"x": torch.full((2,), i + 1.0), "mask": torch.tensor([1, 0]), "steps": 0} for i in range(3)
    ]
    steps = []

    def loss(tree: dict[str, Any], number: int) -> torch.Tensor:
        steps.append(tree["steps"])
        return (tree["x"] * tree["mask"]).sum()

    found = Schedule(Stage(pp, groups.tp), part).train(inputs, 3, loss)
    # x * 2 ** stages; mean of 1, 2, 3 is 2; d/dw of w**n is n factors of 2 less one
    n = pp.world_size
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0 * 2 ** (n - 1), 0.0]
    if pp.is_last_rank:
        assert found is not None
        assert [each.item() for each in found] == [2.0**n, 2.0 * 2**n, 3.0 * 2**n]
        assert steps == [n, n, n]


def one_f_one_b_keeps_few(groups: coordinator.ParallelGroups) -> None:
    """No more graphs are alive than there are stages from here to the last."""
    pp = groups.pp
    alive = most = 0

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            nonlocal alive
            alive -= 1
            return grad * 2

    inputs = [torch.ones(2, requires_grad=True) for _ in range(BATCHES)]
    Schedule(Stage(pp), Count.apply).train(inputs, BATCHES, lambda out, _: out.sum())
    assert (alive, most) == (0, pp.world_size - pp.rank_in_group)


def wrong_calls(groups: coordinator.ParallelGroups) -> None:
    pp = groups.pp
    schedule = Schedule(Stage(pp), nn.Identity())
    if pp.is_first_rank:
        with pytest.raises(ValueError, match="inputs for 3"):
            schedule.infer([torch.ones(1)], 3)
        with pytest.raises(ValueError, match="inputs for 3"):
            schedule.train(None, 3)
    if pp.is_last_rank:
        with pytest.raises(ValueError, match="loss"):
            schedule.train(None, 3)


def an_error_reaches_every_stage(groups: coordinator.ParallelGroups) -> None:
    pp = groups.pp

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no more")

    schedule = Schedule(Stage(pp), fails if pp.is_first_rank else nn.Identity())
    expected = ArithmeticError if pp.is_first_rank else GroupAbortedError
    with pytest.raises(expected, match="no more"):
        schedule.infer([torch.ones(1)], 1)


def schedules(rank: int, n: int, path: str, pp: int, tp: int) -> None:
    with ExitStack() as stack:
        store = dist.FileStore(path, n)
        groups = stack.enter_context(
            coordinator.init(pp=pp, tp=tp, rank=rank, world_size=n, store=store)
        )
        for order in (gpipe, one_f_one_b):
            trains_as_the_undivided_model(groups, order)
        trees_with_integers_pass(groups)
        one_f_one_b_keeps_few(groups)
        wrong_calls(groups)
        all_here(store, n)
        an_error_reaches_every_stage(groups)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2), (3, 1)])
def test_schedules(pp: int, tp: int, store_path: str) -> None:
    run_ranks(pp * tp, schedules, store_path, pp, tp, timeout=120)


def beside_torch(rank: int, n: int, path: str) -> None:
    """The same gradients as torch.distributed.pipelining, which runs over our process group."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    world = init_gloo(rank, n, path)
    pp = coordinator.GroupCoordinator.from_process_group(world, "pp")
    inputs, targets = data()
    loss = nn.functional.mse_loss
    for ours, theirs in ((gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)):
        mine, other = model(n)[rank], model(n)[rank]
        Schedule(Stage(pp), mine, order=ours).train(
            inputs, BATCHES, lambda out, number: loss(out, targets[number])
        )
        pp.barrier(timeout=120)
        stage = PipelineStage(other, rank, n, torch.device("cpu"), group=pp.device_group)
        schedule = theirs(stage, n_microbatches=BATCHES, loss_fn=loss)
        if rank == 0:
            schedule.step(torch.cat(inputs))
        else:
            schedule.step(target=torch.cat(targets))
        pp.barrier(timeout=120)
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    pp.close()


def test_the_same_gradients_as_torchs_schedules(store_path: str) -> None:
    run_ranks(2, beside_torch, store_path, timeout=120)
