"""Reductions that a transport cannot do: it moves the parts, and they are reduced here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.operation import NO_TENSOR, Operation
from device_comm.reduce_op import reduce_in_rank_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_comm.operation import Verb

_MOVED_BY: dict[str, Verb] = {
    "all_reduce": "all_gather",
    "reduce": "gather",
    "reduce_scatter": "all_to_all",
    "reduce_scatterv": "all_to_all",
}


def reduce_here(
    operation: Operation, rank: int, world_size: int
) -> tuple[Operation, Callable[[], None]]:
    """What moves the parts of a reduction to where they are reduced, and the step that does it.

    Args:
        operation: a reduction.
        rank: this one.
        world_size: how many ranks there are.
    """
    op, output = operation.op, operation.output
    verb = _MOVED_BY[operation.verb]
    each = operation.source.numel() if verb != "all_to_all" else output.numel()
    parts: Tensor = NO_TENSOR
    if verb != "gather" or rank == operation.peer:
        parts = operation.source.new_empty((world_size, each))
    sizes = operation.source_sizes
    moving = operation.instead(
        operation.source,
        parts,
        verb=verb,
        source_sizes=sizes,
        output_sizes=None if sizes is None else (each,) * world_size,
    )

    def reduce() -> None:
        if output.numel():
            reduce_in_rank_order(parts.unbind(), op, output.view(-1))

    return moving, reduce
