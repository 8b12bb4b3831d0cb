"""Tables ``{dim: [mesh axes that shard it]}`` with negative dimensions made positive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.layout.placement import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def convert_dim_partition_dict(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """A copy of the table with non-negative dimensions.

    Args:
        dim_size: the tensor's number of dimensions.
        dim_partition_dict: for each dimension, which may be negative, the mesh axes that shard it.

    Raises:
        ValueError: the tensor has no such dimension, or two keys are the same dimension: see
            `merge_same_dim_mesh_list`.
    """
    converted: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        found = Shard(dim).normalized(dim_size).dim
        if found in converted:
            raise ValueError(f"dimension {found} is there twice: {dict(dim_partition_dict)}")
        converted[found] = list(axes)
    return converted


def merge_same_dim_mesh_list(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """As `convert_dim_partition_dict`, but keys that are the same dimension are merged.

    For a tensor of two dimensions ``{1: [0], -1: [1]}`` gives ``{1: [0, 1]}``. The axes are in the
    order of the keys.

    Raises:
        ValueError: the tensor has no such dimension, or an axis occurs twice.
    """
    merged: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        merged.setdefault(Shard(dim).normalized(dim_size).dim, []).extend(axes)
    every = [axis for axes in merged.values() for axis in axes]
    if len(set(every)) != len(every):
        raise ValueError(f"an axis cuts twice: {dict(dim_partition_dict)}")
    return merged
