"""torch's all-reduces in symmetric memory, as a peer of ours: also where ranks share a device.

Inputs lie in memory that all ranks map, so that nothing is copied before the kernels read it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from device_comm.backend import Backend, Capabilities, Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from device_comm import Operation

LIMIT = 64 << 20
"""Bytes of the largest tensor."""

SHARED_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""With 1 in this variable, torch maps memory of ranks that share a device; without multicast."""

SHOTS = {
    "torch's one-shot": "one_shot_all_reduce_out",
    "torch's two-shot": "two_shot_all_reduce_out",
}
"""By what they are called here: operators of ``torch.ops.symm_mem``."""


BLOCKS = 24
"""The largest grid of torch's kernels."""

MOST_ON_A_DEVICE = 4
"""Ranks that may share a device: with 8 on one H100 torch's kernels waited for each other without
end."""


def shared_memory(group: ProcessGroup, device: torch.device) -> Tensor:
    """`LIMIT` bytes that all ranks of the group map. Collective: yes, every member."""
    from torch.distributed import _symmetric_memory  # not in every build

    memory = _symmetric_memory.empty(LIMIT, dtype=torch.uint8, device=device)
    _symmetric_memory.rendezvous(memory, group)
    return memory


class TorchShots(Backend):
    """One rank's end of a group, for sums by one of torch's algorithms.

    Attributes:
        limit: the size in bytes of the largest tensor.
    """

    limit = LIMIT

    def __init__(self, group: ProcessGroup, memory: Tensor, operator: str) -> None:
        """Use ``memory``, from `shared_memory`; ``operator`` is one of `SHOTS`."""
        super().__init__(
            Identity.of(group.rank(), group.size(), memory.device, name=operator),
            Capabilities(operator, verbs=frozenset({"all_reduce"}), stream_ordered=True),
        )
        self._group = group.group_name
        self._memory = memory
        self._reduce = getattr(torch.ops.symm_mem, operator)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        like: Tensor | None = None,  # noqa: ARG002 - there is one memory
    ) -> Tensor:
        """The memory, for inputs: all that ask have the same."""
        return self._memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def start(self, operation: Operation) -> None:
        """Sum inputs that lie in the memory."""
        self._reduce(operation.source, "sum", self._group, operation.output)
