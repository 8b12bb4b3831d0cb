"""Provide vLLM's collectives over the tensor-parallel group."""

from torch import Tensor

from coordinator.compat.vllm.parallel_state import _state, get_tp_group

__all__ = [
    "broadcast_tensor_dict",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_gather",
    "tensor_model_parallel_reduce_scatter",
]

tensor_model_parallel_all_gather = _state.all_gather
tensor_model_parallel_all_reduce = _state.all_reduce
tensor_model_parallel_gather = _state.gather
broadcast_tensor_dict = _state.broadcast_tensor_dict


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's part of the sum, along ``dim``. Collective: yes, every member."""
    return get_tp_group().reduce_scatter(input_, dim)  # type: ignore[no-any-return]
