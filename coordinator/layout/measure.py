"""Measure the cost of collectives, and of the steps of a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from coordinator.group import GroupCoordinator
from coordinator.layout.plan import MeshCosts, Plan
from coordinator.layout.redistribute import take_step
from device_comm import ReduceOp

CALIBRATED_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the measured tensors: small ones determine alpha, large ones beta."""

REPEATS = 5
"""Measurements per size."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The cost of a collective in the alpha-beta model.

    ``alpha`` is microseconds to start it, ``beta`` microseconds per byte.
    """

    alpha: float
    beta: float


def calibrate(
    group: GroupCoordinator, sizes: Sequence[int] = CALIBRATED_SIZES, repeats: int = REPEATS
) -> AlphaBeta:
    """Measure all-gather and all-reduce of several sizes; fit alpha and beta to the times.

    The fit minimises relative errors: all sizes have the same weight. The result comes from the
    slowest rank's times, the same on every rank; 0 for a group of one.

    Args:
        group: the group to measure; the machine should be idle otherwise.
        sizes: bytes of the whole tensors, multiples of 4; at least two different ones.
        repeats: measurements per size; their median counts.

    Collective: yes, every member.

    Raises:
        ValueError: fewer than two sizes, or no repeats.
    """
    if len(set(sizes)) < 2 or any(size < 4 or size % 4 for size in sizes) or repeats < 1:
        raise ValueError(f"cannot fit alpha and beta to {list(sizes)} bytes, {repeats} times each")
    n = group.world_size
    if n == 1:
        return AlphaBeta(0.0, 0.0)
    moved: list[float] = []
    times: list[float] = []
    for size in sizes:
        part = torch.zeros(-(-size // n), dtype=torch.uint8, device=group.device)
        whole = torch.zeros(size, dtype=torch.uint8, device=group.device).view(torch.float32)
        moved += [(n - 1) / n * size, 2 * (n - 1) / n * size]
        times += [
            median_time(partial(group.all_gather, part, 0), group, repeats),
            median_time(partial(group.all_reduce, whole), group, repeats),
        ]
    return _fit(moved, slowest(times, [group]))


def calibrate_mesh(
    axes: Sequence[GroupCoordinator],
    sizes: Sequence[int] = CALIBRATED_SIZES,
    repeats: int = REPEATS,
) -> MeshCosts:
    """Measure the group along each axis of a mesh, one after the other.

    Returns the costs of the slowest group along each axis, the same on every rank of the mesh.
    Raises ValueError as `calibrate`.

    Collective: yes, every rank of the mesh.
    """
    fits = [calibrate(axis, sizes, repeats) for axis in axes]
    costliest = slowest([each.alpha for each in fits] + [each.beta for each in fits], axes)
    return MeshCosts(
        tuple(axis.world_size for axis in axes),
        tuple(costliest[: len(axes)]),
        tuple(costliest[len(axes) :]),
    )


def median_time(verb: Callable[[], object], group: GroupCoordinator, repeats: int) -> float:
    """Return the median microseconds of ``repeats`` calls, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        group.barrier()
        start = time.perf_counter()
        verb()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])


def slowest(values: Sequence[float], groups: Sequence[GroupCoordinator]) -> list[float]:
    """Return each value's maximum over all ranks of the mesh. Collective: yes, every rank."""
    result = torch.tensor(values, dtype=torch.float64, device="cpu")
    for group in groups:
        result = group.all_reduce(result.to(group.device), op=ReduceOp.MAX).cpu()
    return result.tolist()


def _fit(moved: Sequence[float], times: Sequence[float]) -> AlphaBeta:
    """Fit ``alpha + beta * moved`` to ``times`` by least squares of the relative errors.

    In plain Python: results of a linear algebra library may differ in the last bit between
    processes, and ranks with different costs could make different plans.
    """
    starts = [1 / time_ for time_ in times]
    volumes = [volume / time_ for volume, time_ in zip(moved, times, strict=True)]
    aa, bb, ab = _dot(starts, starts), _dot(volumes, volumes), _dot(starts, volumes)
    determinant = aa * bb - ab * ab
    alpha = (sum(starts) * bb - sum(volumes) * ab) / determinant
    beta = (sum(volumes) * aa - sum(starts) * ab) / determinant
    if alpha < 0:
        return AlphaBeta(0.0, sum(volumes) / bb)
    if beta < 0:
        return AlphaBeta(sum(starts) / aa, 0.0)
    return AlphaBeta(alpha, beta)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan and the microseconds measured for each step; ``print`` shows both."""

    plan: Plan
    times: tuple[float, ...]

    @property
    def time(self) -> float:
        """Return the measured microseconds of all steps."""
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
    """Run each step of a plan several times, on tensors of zeros.

    Returns the plan with the slowest rank's times, the same on every rank.

    Args:
        plan: the plan, the same on all ranks.
        group: the group along each axis of the mesh, outermost first; or the only one.
        dtype: the tensors' dtype; its size should be the planned ``itemsize``.
        repeats: measurements per step; their median counts.

    Collective: yes, every member of every group.

    Raises:
        ValueError: the groups form another mesh than the plan's, or ``repeats`` is less than 1.
    """
    axes = tuple(group) if isinstance(group, Sequence) else (group,)
    mesh = tuple(axis.world_size for axis in axes)
    if mesh != plan.mesh or repeats < 1:
        raise ValueError(
            f"cannot measure a plan for a mesh of {plan.mesh} on {mesh}, {repeats} times"
        )
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
