"""vLLM's collectives over the tensor-parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from coordinator.compat.vllm.parallel_state import get_tp_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = [
    "broadcast_tensor_dict",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_gather",
    "tensor_model_parallel_reduce_scatter",
]


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """The sum of every ``input_``. Collective: yes, every member."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Every ``input_``, concatenated along ``dim``. Collective: yes, every member."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """This rank's part of the sum, along ``dim``. Collective: yes, every member."""
    return get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """Every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
    return get_tp_group().gather(input_, dst, dim)


def broadcast_tensor_dict(tensor_dict: Mapping[str, Any] | None = None, src: int = 0) -> Any:
    """The dict of ``src``, on all; without torch's default group, one's own. Collective: yes."""
    if not dist.is_initialized():
        return tensor_dict
    return get_tp_group().broadcast_tensor_dict(tensor_dict, src)
