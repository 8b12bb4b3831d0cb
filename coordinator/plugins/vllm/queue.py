"""Provide the message queue between vLLM's engine and its workers."""

from __future__ import annotations

import torch.distributed as dist

from coordinator.compat.vllm.device_communicators import shm_broadcast
from shm_broadcast import DRIVER_RANK


class MessageQueue(shm_broadcast.MessageQueue):
    """vLLM's queue, with errors that name a dead worker by rank."""

    def _own_rank(self) -> int:
        """Return a worker's rank; the engine is the driver."""
        return dist.get_rank() if dist.is_initialized() else DRIVER_RANK
