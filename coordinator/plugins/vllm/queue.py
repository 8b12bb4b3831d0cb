"""Provide the message queue between vLLM's engine and its workers."""

from typing import Any

import torch.distributed as dist

from coordinator.compat.vllm.device_communicators import shm_broadcast


class MessageQueue(shm_broadcast.MessageQueue):
    """vLLM's queue, with errors that name a dead worker by rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create a queue; a worker writes by its rank, the engine as the driver."""
        if dist.is_initialized():
            options.setdefault("writer_rank", dist.get_rank())
        super().__init__(*args, **options)
