"""vLLM's helpers: arithmetic, and process groups without a default one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from coordinator.compat.arithmetic import (
    divide,
    ensure_divisibility,
    layers_as_told,
    split_tensor_along_last_dim,
)
from coordinator.compat.errors import NotInitializedError
from coordinator.compat.vllm import parallel_state
from coordinator.compat.vllm.stateless_process_group import StatelessProcessGroup
from coordinator.compat.vllm.stateless_torch_groups import (
    cpu_all_reduce_,
    create_tcp_store,
    get_cached_tcp_store_client,
    init_gloo_process_group,
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "StatelessProcessGroup",
    "cpu_all_reduce_",
    "create_tcp_store",
    "divide",
    "ensure_divisibility",
    "get_cached_tcp_store_client",
    "get_pp_indices",
    "get_worker_rank_suffix",
    "init_gloo_process_group",
    "is_weak_contiguous",
    "split_tensor_along_last_dim",
    "stateless_destroy_torch_distributed_process_group",
    "stateless_init_torch_distributed_process_group",
    "verify_group_size_divides_partition",
]


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The first layer of a stage and the first of the next.

    The environment variable ``VLLM_PP_LAYER_PARTITION`` may say how many layers each stage has:
    ``"5,6,5"``. Otherwise all have as many; what is left over goes to the last stages but the very
    last, one layer each, for the last one also has the head.

    Raises:
        ValueError: the variable does not fit the layers and stages.
    """
    told = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if told is not None:
        return layers_as_told(told, num_hidden_layers, pp_rank, pp_size)
    each, left = divmod(num_hidden_layers, pp_size)
    more = range(pp_size - 1 - left, pp_size - 1)
    start = pp_rank * each + sum(stage < pp_rank for stage in more)
    return start, start + each + (pp_rank in more)


def verify_group_size_divides_partition(
    input_size_per_partition: int,
    group_size: int,
    layer_name: str | None = None,
    extra_suggestion: str = "",
) -> None:
    """Accept only a part of a layer that holds whole groups of quantised weights.

    Args:
        input_size_per_partition: what a rank holds of the layer's input.
        group_size: how many weights share a scale.
        layer_name: for the error.
        extra_suggestion: ends it.

    Raises:
        ValueError: the groups do not come out even.
    """
    if input_size_per_partition % group_size:
        layer = f" of layer {layer_name!r}" if layer_name else ""
        raise ValueError(
            f"{input_size_per_partition} weights a rank{layer} are not divisible into groups of "
            f"{group_size}: choose a smaller tensor_parallel_size{extra_suggestion}"
        )


def is_weak_contiguous(inp: Tensor) -> bool:
    """Whether a tensor lies in one piece, in whatever order, that ends where its storage ends."""
    if inp.is_contiguous():
        return True
    behind = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return behind == inp.numel() * inp.element_size()


def get_worker_rank_suffix(global_rank: int | None = None) -> str:
    """Where this process stands: ``"dp0_pp0_tp1_dcp0_ep1_rank1"``; without groups, ``"rank1"``.

    Args:
        global_rank: what comes last; None: nothing.
    """
    last = [] if global_rank is None else [f"rank{global_rank}"]
    try:
        groups = {
            "dp": parallel_state.get_dp_group(),
            "pp": parallel_state.get_pp_group(),
            "tp": parallel_state.get_tp_group(),
            "dcp": parallel_state.get_dcp_group(),
            "ep": parallel_state.get_ep_group(),
        }
    except NotInitializedError:
        return "".join(last)
    return "_".join([*(f"{name}{group.rank_in_group}" for name, group in groups.items()), *last])
