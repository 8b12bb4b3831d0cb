"""Provide SGLang's helpers: arithmetic, stores, and groups over a store."""

from __future__ import annotations

import os

from torch.distributed import all_gather_into_tensor as all_gather_single
from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

from coordinator.compat.sglang.parallel_state import get_global_tcp_store, set_global_tcp_store
from coordinator.compat.state import (
    divide,
    ensure_divisibility,
    layers_of_stage,
    split_tensor_along_last_dim,
)
from coordinator.compat.vllm.utils import StatelessProcessGroup
from coordinator.group import GroupCoordinator

__all__ = [
    "StatelessProcessGroup",
    "all_gather_single",
    "divide",
    "ensure_divisibility",
    "get_global_tcp_store",
    "get_group_rank_size",
    "get_pp_indices",
    "reduce_scatter_single",
    "set_global_tcp_store",
    "split_tensor_along_last_dim",
]


def get_group_rank_size(group: GroupCoordinator | None) -> tuple[int, int]:
    """Return this rank in the group, and its size; without a group (0, 1)."""
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Return the first layer of a stage and the first of the next.

    ``SGLANG_PP_LAYER_PARTITION`` in the environment may set the layers of each of several stages:
    ``"5,6,5"``. Otherwise all have equally many; of the remainder the last stages get one layer
    each.

    Raises ValueError if the variable does not fit the layers and stages.
    """
    partition = os.environ.get("SGLANG_PP_LAYER_PARTITION")
    if partition is not None and pp_size > 1:
        return layers_of_stage(partition, num_hidden_layers, pp_rank, pp_size)
    each, left = divmod(num_hidden_layers, pp_size)
    start = pp_rank * each + max(0, pp_rank - (pp_size - left))
    return start, start + each + (pp_rank >= pp_size - left)
