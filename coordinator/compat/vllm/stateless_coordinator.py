"""vLLM's groups over a store alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

from torch.distributed import Store

from coordinator import groups
from coordinator.compat.vllm.group import GroupCoordinator
from coordinator.compat.vllm.utils import StatelessProcessGroup


class StatelessGroupCoordinator(GroupCoordinator):
    """A group whose members meet in a store of their choice."""

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
        global_world_size: int = 1,  # noqa: ARG002 - the members are all that there is
        use_all2all: bool = False,  # noqa: ARG002 - dispatch and combine always work
    ) -> None:
        """As `coordinator.StatelessGroupCoordinator`.

        Collective: yes, every member of the group that ``global_rank`` is in.
        """
        group = groups.StatelessGroupCoordinator(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            coord_store,
            use_message_queue_broadcaster,
            group_name,
            host,
            global_rank,
        )
        self._show(group, lambda: [list(ranks) for ranks in group_ranks])

    @property
    def backend(self) -> str:
        """``"gloo"`` or ``"nccl"``."""
        return self.torch_distributed_backend

    @cached_property
    def tcp_store_group(self) -> StatelessProcessGroup:
        """The same members, for objects and small CPU tensors."""
        return StatelessProcessGroup(self.group, ExitStack())

    def size(self) -> int:
        """How many members."""
        return self.world_size
