"""Provide vLLM's collectives over the tensor-parallel group."""

from __future__ import annotations

from torch import Tensor

from coordinator.compat.vllm.parallel_state import _getters, get_tp_group

__all__ = [
    "broadcast_tensor_dict",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_gather",
    "tensor_model_parallel_reduce_scatter",
]

tensor_model_parallel_all_reduce = _getters.all_reduce
tensor_model_parallel_gather = _getters.gather
broadcast_tensor_dict = _getters.broadcast_tensor_dict


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Return every ``input_``, concatenated along ``dim``. Collective: yes, every member."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's part of the sum, along ``dim``. Collective: yes, every member."""
    return get_tp_group().reduce_scatter(input_, dim)
