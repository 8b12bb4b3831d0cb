"""Provide SGLang's collectives over a model's groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coordinator.compat.sglang.parallel_state import (
    _getters,
    get_attn_cp_group,
    get_attn_tp_group,
    get_moe_ep_group,
    get_moe_tp_group,
    get_tp_group,
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

tensor_model_parallel_all_reduce = _getters.all_reduce
tensor_model_parallel_gather = _getters.gather
broadcast_tensor_dict = _getters.broadcast_tensor_dict


def tensor_model_parallel_quant_all_reduce(input_: Tensor) -> Tensor:
    """As `tensor_model_parallel_all_reduce`: only NPUs quantise. Collective: yes."""
    return get_tp_group().quant_all_reduce(input_)


def tensor_model_parallel_fused_allreduce_rmsnorm(
    input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
) -> None:
    """Return None: there is no such kernel; the caller runs the steps."""


def tensor_model_parallel_fused_allreduce_rmsnorm_quant_per_group(
    input_: Tensor,
    residual_inp_: Tensor,
    weight_: Tensor,
    eps: float,
    group_size: int = 128,
    emit_bf16: bool = False,
    transpose_scale: bool = False,
) -> None:
    """Return None: there is no such kernel; the caller runs the steps."""


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor | None:
    """Return every ``input_``, concatenated along ``dim``. Collective: yes, every member."""
    return get_tp_group().all_gather(input_, dim)


def attn_cp_tp_broadcast_pyobj(data: list[Any]) -> list[Any]:
    """Return the list of the first rank of an attention replica, on all of its ranks.

    Collective: yes, every rank of the replica.
    """
    along, across = get_attn_cp_group(), get_attn_tp_group()
    if across.is_first_rank:
        data = along.broadcast_object(data)
    return across.broadcast_object(data)  # type: ignore[no-any-return]


def attention_tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Return the sum over the ranks that share an attention layer. Collective: yes."""
    return get_attn_tp_group().all_reduce(input_)


def attention_tensor_model_parallel_quant_all_reduce(input_: Tensor) -> Tensor:
    """As `attention_tensor_model_parallel_all_reduce`: only NPUs quantise. Collective: yes."""
    return get_attn_tp_group().quant_all_reduce(input_)


def moe_tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Return the sum over the ranks that share an expert. Collective: yes, every member."""
    return get_moe_tp_group().all_reduce(input_)


def moe_expert_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Return the sum over the ranks that hold different experts. Collective: yes."""
    return get_moe_ep_group().all_reduce(input_)
