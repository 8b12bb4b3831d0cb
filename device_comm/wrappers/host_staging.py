"""Moves tensors of a device through the host's memory: slow, but works with any CPU backend.

Inputs are copied to the CPU, a CPU backend carries out the operation, and the output is copied
back. A call returns when its result is there, so it cannot be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from device_comm.backend import Backend
from device_comm.operation import NO_TENSOR
from device_comm.work import Followed
from device_comm.wrappers.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from device_comm.choice import Explanation
    from device_comm.operation import Operation
    from device_comm.work import Pending


class HostStaging(Wrapper):
    """One rank's end of a group whose tensors are on a device. One thread at a time."""

    def __init__(self, inner: Backend, device: torch.device | str) -> None:
        """Move tensors of ``device`` by ``inner``.

        Args:
            inner: a CPU backend of the same ranks. Its maker closes it, and may use it as well.
            device: this rank's device.
        """
        super().__init__(
            inner,
            replace(inner.identity, device=torch.device(device)),
            replace(inner.capabilities, backend="host", series=False, normed=frozenset()),
            closes=False,
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """As `Backend.empty`, on this rank's device."""
        return Backend.empty(self, shape, dtype, like)

    def norms(self, x: Tensor, weight: Tensor) -> bool:  # noqa: ARG002 - none of them
        """No: what is added and normed stays on the device."""
        return False

    def explain(self) -> Explanation:
        """As `Backend.explain`, with what the CPU backend has refused. Collective: no."""
        return replace(Backend.explain(self), refused=self._inner.explain().refused)

    def start(self, operation: Operation) -> Pending | None:
        """Carry out ``operation`` on the CPU, then copy its output back."""
        output = operation.output
        there = output
        if output is not NO_TENSOR:
            there = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        pending = self._inner.start(operation.instead(operation.source.cpu(), there))
        if pending is not None:
            return Followed(pending, lambda: output.copy_(there))
        output.copy_(there)
        return None
