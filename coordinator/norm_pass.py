"""Finds the all-reduce with residual and norm in graphs of models that write it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.fx import Graph


def all_reduce_norm_pass() -> Callable[[Graph], None]:
    """A pass of torch's compiler that makes one op of an all-reduce with residual and norm.

    The op is `GroupCoordinator.all_reduce_norm`, one kernel where that is. Ask for it by
    ``torch.compile(model, options={"post_grad_custom_pre_pass": all_reduce_norm_pass()})``.
    It rewrites what comes to this, in whatever way it is written::

        kept = residual + group.all_reduce(x)
        output = rms_norm(kept) * weight

    by `torch.nn.functional.rms_norm`, or by squares, mean, rsqrt and products, in float32 if the
    tensors are narrower. The results differ by rounding: ``kept`` is rounded once, and normed as it
    was rounded, and the weight is multiplied before the result is rounded.

    It leaves everything as it is

    - of groups without such a kernel for the dtype, as on CPUs, over NCCL alone, or of one rank,
    - where the sum itself is used once more, or reduced by another operation than SUM,
    - where ``residual`` has not the shape of ``x``, or ``weight`` is not one row, or one of them is
      of another dtype than ``x``, or the weight is computed after the sum,
    - where the norm is over more than the last dimension, or narrow numbers are normed in their
      own precision.

    Collective: no; but let all members compile with it, or none: which verb comes when must be the
    same on all ranks.

    Raises:
        NotImplementedError: this torch has no pattern matcher of the kind; its interface is
            private, and this pass was made for that of torch 2.11 to 2.13.
    """
    try:
        # It takes as long to import as torch itself.
        from coordinator.norm_patterns import NormPass  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no pattern matcher that is known here: {error}"
        ) from error
    return NormPass()
