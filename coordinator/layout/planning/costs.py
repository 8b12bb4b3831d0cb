"""The cost of collectives on a mesh, in microseconds, by the alpha-beta model.

    n: ranks of the axis    a: alpha, the time to start    b: beta, the time per byte
    B: bytes of a rank's tensor, before or after the collective as noted

    all_gather      a + b · (n-1)/n · B + 0.1             B: the gathered tensor
    all_reduce      a + 2b · (n-1)/n · B + 0.01           B: the tensor
    reduce_scatter  a + b · (n-1)/n · B + 0.001           B: the tensor before
    all_to_all      a + b · (n-1)/n² · B · n/2 + 0.001    B: the tensor before, as large as after
    mix_gather      as all_gather, over all axes at once: the largest a, the smallest b

The small constants decide between collectives that cost the same otherwise. A step that does not
communicate costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_ALPHA = 20.0
"""Microseconds to start a collective, if nothing was measured."""

DEFAULT_BETA = 0.0005
"""Microseconds per byte, if nothing was measured: 2 GB/s."""

Axes = int | Sequence[int]
"""One axis of a mesh, or several, in ascending order, that are used as one."""


@dataclass(frozen=True, slots=True)
class MeshCosts:
    """The sizes of a mesh's axes, and the cost of communicating along each.

    Attributes:
        shape: the number of ranks on each axis, outermost first.
        alpha: for each axis, microseconds to start a collective.
        beta: for each axis, microseconds per byte.
    """

    shape: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the values."""
        if not len(self.shape) == len(self.alpha) == len(self.beta):
            raise ValueError(f"shape, alpha and beta have one entry for each axis; got {self}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"every axis has 1 rank or more; got {self.shape}")

    @classmethod
    def uniform(
        cls, shape: Sequence[int], alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA
    ) -> MeshCosts:
        """The same costs along all axes."""
        return cls(tuple(shape), (alpha,) * len(shape), (beta,) * len(shape))

    def all_gather(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-gather whose result has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.1

    def all_reduce(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-reduce of a tensor of ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * 2 * (n - 1) / n * size + 0.01

    def reduce_scatter(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of a reduce-scatter whose input has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.001

    def all_to_all(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-to-all in which each rank has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n / n * size * (n / 2) + 0.001

    def mix_gather(self, size: float) -> float:
        """Microseconds of an all-gather over all axes at once whose result has ``size`` bytes."""
        return self.all_gather(size, range(len(self.shape)))

    def _of(self, axes: Axes) -> tuple[int, float, float]:
        """Ranks, alpha and beta of an axis, or of several that are used as one."""
        if isinstance(axes, int):
            return self.shape[axes], self.alpha[axes], self.beta[axes]
        return (
            math.prod(self.shape[axis] for axis in axes),
            max(self.alpha[axis] for axis in axes),
            min(self.beta[axis] for axis in axes),
        )
