# mypy: disable-error-code="override"
"""Provide vLLM's groups that need only a store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch.distributed import Store

from coordinator import groups
from coordinator.compat.vllm.parallel_state import GroupCoordinator
from coordinator.compat.vllm.utils import StatelessProcessGroup


class StatelessGroupCoordinator(GroupCoordinator, groups.StatelessGroupCoordinator):
    """A group whose members rendezvous in a given store."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        coord_store: Store,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        host: str = "127.0.0.1",
        global_rank: int = 0,
        global_world_size: int = 1,  # noqa: ARG002 - the members' ranks are enough
        use_all2all: bool = False,  # noqa: ARG002 - dispatch and combine always work
        **options: Any,
    ) -> None:
        """Build as `coordinator.StatelessGroupCoordinator`.

        Collective: yes, every member of the group of ``global_rank``.
        """
        groups.StatelessGroupCoordinator.__init__(
            self,
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            coord_store,
            use_message_queue_broadcaster,
            group_name,
            host,
            global_rank,
            **options,
        )
        self.group_ranks = [list(ranks) for ranks in group_ranks]

    @property
    def backend(self) -> str:
        """Return ``"gloo"`` or ``"nccl"``."""
        return self.torch_distributed_backend

    @cached_property
    def tcp_store_group(self) -> StatelessProcessGroup:
        """Return the same members, for objects and small CPU tensors."""
        return StatelessProcessGroup.of(self.group)

    def size(self) -> int:
        """Return the number of members."""
        return self.world_size
