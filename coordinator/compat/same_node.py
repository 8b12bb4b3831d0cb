"""Which ranks share a node, by the name that engines have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm_broadcast.queue.rendezvous import as_object_group, ranks_beside

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shm_broadcast.queue.rendezvous import ObjectGroup


def in_the_same_node_as(pg: ProcessGroup | ObjectGroup, source_rank: int = 0) -> list[bool]:
    """For each rank of ``pg``, whether it can attach shared memory of ``source_rank``.

    Collective: yes, every rank of ``pg``.
    """
    group = as_object_group(pg)
    beside = (source_rank, *ranks_beside(group, source_rank))
    return [rank in beside for rank in range(group.world_size)]
