"""Sends pieces of different shapes from every rank to every rank, in one collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.group import GroupCoordinator


def swap(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: GroupCoordinator
) -> list[Tensor]:
    """Send ``pieces[r]`` to rank r; return the pieces that come from each rank, by rank.

    Args:
        pieces: one for each rank, of any shapes, all of one dtype; may be empty.
        shapes: the shape of the piece that comes from each rank.
        group: the group of the ranks.

    Collective: yes, every member.
    """
    if group.world_size == 1:
        return list(pieces)
    sizes = [math.prod(shape) for shape in shapes]
    received = group.all_to_all(
        torch.cat([piece.reshape(-1) for piece in pieces]),
        input_sizes=[piece.numel() for piece in pieces],
        output_sizes=sizes,
    )
    parts = received.split(sizes)  # type: ignore[no-untyped-call]
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
