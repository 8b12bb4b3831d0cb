"""Cutting sizes, tensors and layers into equal parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coordinator.compat.errors import NotDivisibleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Accept only a multiple of ``denominator``.

    Raises:
        NotDivisibleError: it is none.
    """
    if numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient, which is whole.

    Raises:
        NotDivisibleError: it is not.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """The equal parts of ``tensor`` (..., n), each (..., n / num_partitions).

    Args:
        tensor: of one dimension or more.
        num_partitions: divides n.
        contiguous_split_chunks: copies, in one piece each; otherwise views of ``tensor``.

    Raises:
        NotDivisibleError: it does not divide n.
    """
    parts = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def layers_as_told(
    told: str, num_hidden_layers: int, pp_rank: int, pp_size: int
) -> tuple[int, int]:
    """The first layer of a stage and the first of the next, where a list says how many each has.

    Args:
        told: one number for each stage, with commas between.
        num_hidden_layers: what they add up to.
        pp_rank: the stage.
        pp_size: how many stages.

    Raises:
        ValueError: they are not numbers, or too few or many, or do not add up.
    """
    try:
        layers = [int(each) for each in told.split(",")]
    except ValueError as error:
        raise ValueError(f"layers of each stage must be numbers; got {told!r}") from error
    if len(layers) != pp_size or sum(layers) != num_hidden_layers:
        raise ValueError(
            f"{told!r} puts {sum(layers)} layers on {len(layers)} stages; "
            f"there are {num_hidden_layers} layers and {pp_size} stages"
        )
    start = sum(layers[:pp_rank])
    return start, start + layers[pp_rank]
