"""The message queue between vLLM's engine and its workers."""

from __future__ import annotations

import torch.distributed as dist

from coordinator.compat.vllm.device_communicators import shm_broadcast
from shm_broadcast import DRIVER_RANK


def own_rank() -> int:
    """What messages call this process: a worker by its rank, the engine as the driver."""
    return dist.get_rank() if dist.is_initialized() else DRIVER_RANK


class MessageQueue(shm_broadcast.MessageQueue):
    """As vLLM's, whose readers are told by rank which worker has died."""

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        """A new queue; this process writes. Collective: no."""
        super().__init__(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            enable_shm_tensor_arena,
            writer_rank=own_rank(),
        )
