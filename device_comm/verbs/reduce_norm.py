"""An all-reduce with what a model does next: it adds the residual, and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling
from torch.nn.functional import rms_norm

from device_comm.operation import Norm, Operation
from device_comm.verbs.arrange import plain
from device_comm.verbs.checks import check_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_comm.verbs.arguments import Timeout
    from device_comm.verbs.runner import Runner, Traced


def reduce_and_norm(
    run: Runner,
    traced: Traced | None,
    all_reduce: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    timeout: Timeout,
) -> tuple[Tensor, Tensor]:
    """In one operation where the backend has it, else in steps; see
    `device_comm.verbs.symmetric.SymmetricVerbs.all_reduce_norm`.
    """
    if is_compiling():
        learns = _learns(x, residual, weight)
        if traced is None or learns or x.dtype not in run.backend.capabilities.normed:
            return _in_steps(all_reduce, x, residual, weight, epsilon)
        return traced.all_reduce_norm(x, residual, weight, epsilon)
    check_tensor("x", x, run.device)
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise TypeError(f"x must be rows of floats, not {x.dim()} dimensions of {x.dtype}")
    _check_like("residual", residual, x, x.shape)
    _check_like("weight", weight, x, x.shape[-1:])
    learns = _learns(x, residual, weight)
    if not learns and run.world_size > 1 and run.backend.norms(x, weight):
        # A layout is each rank's own: what is launched must not depend on it.
        x, residual, weight = map(plain, (x, residual, weight))
        output, kept = run.new(x.shape, x.dtype, x), run.new(x.shape, x.dtype, x)
        norm = Norm(residual, weight, kept, epsilon)
        run.run(Operation("all_reduce", x, output, timeout=timeout, norm=norm, shape=x.shape), None)
        return output, kept
    return _in_steps(all_reduce, x, residual, weight, epsilon)


def _in_steps(
    all_reduce: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    kept = residual + all_reduce(x)
    return rms_norm(kept, weight.shape, weight, epsilon), kept


def _learns(*given: Tensor) -> bool:
    """Whether autograd would have to know of what is done."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in given)


def _check_like(label: str, given: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(label, given, x.device)
    if given.dtype != x.dtype:
        raise TypeError(f"{label} is {given.dtype}; x is {x.dtype}")
    if given.shape != shape:
        raise ValueError(f"{label} has shape {tuple(given.shape)}, not {tuple(shape)}")
