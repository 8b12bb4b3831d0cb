"""Replace all-reduce, residual and norm in graphs of models by one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.fx import Graph


def all_reduce_norm_pass() -> Callable[[Graph], None]:
    """Return a pass for torch's compiler that fuses all-reduce, residual and norm.

    Use ``torch.compile(model, options={"post_grad_custom_pre_pass": all_reduce_norm_pass()})``. The
    pass replaces by `GroupCoordinator.all_reduce_norm`, one kernel on some devices::

        kept = residual + group.all_reduce(x)
        output = rms_norm(kept) * weight

    The norm is `torch.nn.functional.rms_norm`, or squares, mean, rsqrt and products, in float32 if
    the tensors are narrower. The results differ by rounding: ``kept`` is rounded once, the norm is
    that of the rounded ``kept``, and the weight is multiplied before the result is rounded.

    The pass changes nothing

    - for groups without such a kernel for the dtype, as on CPUs, over NCCL alone, or of one rank,
    - where the sum has another use, or the reduction is not SUM,
    - where ``residual`` has another shape than ``x``, ``weight`` is not one row, one of them has
      another dtype than ``x``, or the weight is computed after the sum,
    - where the norm is over more than the last dimension, or narrow tensors are normalised in
      their own precision.

    All members must compile with the pass, or none: the order of verbs must be the same on all
    ranks.

    Raises:
        NotImplementedError: torch's pattern matcher, a private interface, differs from that of
            torch 2.11 to 2.13.
    """
    try:
        # Importing torch._inductor takes as long as importing torch.
        from coordinator.norm_patterns import NormPass  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no pattern matcher with the expected interface: {error}"
        ) from error
    return NormPass()
