"""Provide SGLang's collectives over a model's groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from coordinator.compat.sglang.parallel_state import (
    _no_kernel,
    _state,
    get_attn_cp_group,
    get_attn_tp_group,
)

__all__ = [
    "attention_tensor_model_parallel_all_reduce",
    "attention_tensor_model_parallel_quant_all_reduce",
    "attn_cp_tp_broadcast_pyobj",
    "broadcast_tensor_dict",
    "moe_expert_parallel_all_reduce",
    "moe_tensor_model_parallel_all_reduce",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_fused_allreduce_rmsnorm",
    "tensor_model_parallel_fused_allreduce_rmsnorm_quant_per_group",
    "tensor_model_parallel_gather",
    "tensor_model_parallel_quant_all_reduce",
]


def _all_reduce(name: str) -> Callable[[Tensor], Tensor]:
    def all_reduce(input_: Tensor) -> Tensor:
        """Return the sum of every ``input_``. Collective: yes, every member."""
        return _state.group(name).all_reduce(input_)  # type: ignore[no-any-return]

    return all_reduce


# Only NPUs quantise.
tensor_model_parallel_all_reduce = tensor_model_parallel_quant_all_reduce = _state.all_reduce
attention_tensor_model_parallel_all_reduce = _all_reduce("attn_tp")
attention_tensor_model_parallel_quant_all_reduce = attention_tensor_model_parallel_all_reduce
moe_tensor_model_parallel_all_reduce = _all_reduce("moe_tp")
moe_expert_parallel_all_reduce = _all_reduce("moe_ep")
tensor_model_parallel_fused_allreduce_rmsnorm = _no_kernel
tensor_model_parallel_fused_allreduce_rmsnorm_quant_per_group = _no_kernel
tensor_model_parallel_all_gather = _state.all_gather
tensor_model_parallel_gather = _state.gather
broadcast_tensor_dict = _state.broadcast_tensor_dict


def attn_cp_tp_broadcast_pyobj(data: list[Any]) -> list[Any]:
    """Return the list of the first rank of an attention replica, on all of its ranks.

    Collective: yes, every rank of the replica.
    """
    along, across = get_attn_cp_group(), get_attn_tp_group()
    if across.is_first_rank:
        data = along.broadcast_object(data)
    return across.broadcast_object(data)  # type: ignore[no-any-return]
