"""The message queue between vLLM's engine and its workers."""

from __future__ import annotations

import torch.distributed as dist

from coordinator.compat.vllm.device_communicators import shm_broadcast
from shm_broadcast import DRIVER_RANK


class MessageQueue(shm_broadcast.MessageQueue):
    """As vLLM's, whose readers are told by rank which worker has died."""

    def _own_rank(self) -> int:
        """What messages call this process: a worker by its rank, the engine as the driver."""
        return dist.get_rank() if dist.is_initialized() else DRIVER_RANK
