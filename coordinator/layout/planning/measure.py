"""Measures how long the steps of a plan take, to compare with the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from coordinator.layout.moving.redistribute import take_step
from coordinator.layout.planning.calibrate import REPEATS, median_time, slowest

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator
    from coordinator.layout.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan with measured times; ``print`` shows both.

    Attributes:
        plan: the plan, with the costs by the model.
        times: the measured time of each step, in microseconds.
    """

    plan: Plan
    times: tuple[float, ...]

    @property
    def time(self) -> float:
        """The measured time of all steps, in microseconds."""
        return sum(self.times)

    def __str__(self) -> str:
        head = f"{self.plan.head}, {self.time:.3f} µs measured"
        steps = zip(self.plan.steps, self.times, strict=True)
        return "\n".join([head, *(f"  {step}  {time:.3f} µs measured" for step, time in steps)])


def measure(
    plan: Plan,
    group: GroupCoordinator | Sequence[GroupCoordinator],
    dtype: torch.dtype = torch.float32,
    repeats: int = REPEATS,
) -> MeasuredPlan:
    """Carry out each step of a plan several times, on tensors of zeros.

    Args:
        plan: the plan, the same on all ranks.
        group: the group along each axis of the mesh, outermost first; or the only one.
        dtype: the tensors' dtype; its size should be the one that was planned for.
        repeats: how often each step is measured; the median counts.

    Returns:
        The measured plan, the same on every rank: the slowest rank's times count.

    Collective: yes, every member of every group.

    Raises:
        ValueError: the groups form another mesh than the plan's, or ``repeats`` is less than 1.
    """
    axes = tuple(group) if isinstance(group, Sequence) else (group,)
    mesh = tuple(axis.world_size for axis in axes)
    if mesh != plan.mesh or repeats < 1:
        raise ValueError(f"a plan for a mesh of {plan.mesh} on {mesh}, {repeats} times")
    coordinates = [axis.rank_in_group for axis in axes]
    times = []
    for step in plan.steps:
        extents = step.before.extents(plan.shape, mesh, coordinates)
        held = torch.zeros(
            [extent.size for extent in extents], dtype=dtype, device=axes[step.axis].device
        )
        times.append(
            median_time(partial(take_step, plan, step, held, axes), axes[step.axis], repeats)
        )
    return MeasuredPlan(plan, tuple(slowest(times, axes)))
