"""Keeps the launches of operations that are repeated, such as those of a model's layers.

Planning and packing a launch costs more than making it. An operation whose memory, sizes and
reduction were seen before is launched with what was packed then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from device_comm.cuda.ipc.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.device.driver import Driver, PreparedLaunch
    from device_comm.cuda.launches.launch import Algorithm
    from device_comm.cuda.launches.planner import Planner
    from device_comm.operation import Norm, Operation

MOST: Final = 4096
"""Operations that are kept, of about 1 KiB each; then all are forgotten."""


class PreparedLaunches:
    """The launches of one rank's operations that have the planner's time limit."""

    def __init__(self, driver: Driver, planner: Planner, world_size: int) -> None:
        """Keep none yet."""
        self._driver = driver
        self._planner = planner
        self._world_size = world_size
        self._kept: dict[object, Sequence[PreparedLaunch]] = {}

    def launches(self, operation: Operation, algorithm: Algorithm) -> Sequence[PreparedLaunch]:
        """The launches of ``operation``, staged.

        Args:
            operation: as for `recipe`.
            algorithm: the algorithm of an all-reduce.
        """
        source, output = operation.source, operation.output
        key = (
            operation.verb,
            source.data_ptr(),
            output.data_ptr(),
            source.nbytes,
            output.nbytes,
            source.dtype,
            output.dtype,
            operation.op,
            operation.peer,
            algorithm,
            _fixed(operation.source_sizes),
            _fixed(operation.output_sizes),
            None if operation.norm is None else _marks(operation.norm),
        )
        known = self._kept.get(key)
        if known is None:
            planned = recipe(operation, self._world_size, algorithm).launches(self._planner, 0)
            known = [self._driver.prepare(*each) for each in planned]
            if len(self._kept) >= MOST:
                self._kept.clear()
            self._kept[key] = known
        return known


def _fixed(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def _marks(norm: Norm) -> tuple[float, ...]:
    weight = norm.weight
    rest = norm.residual.data_ptr(), norm.kept.data_ptr(), norm.epsilon
    return (weight.data_ptr(), weight.nbytes, *rest)
