"""How the ranks of a group find out what a queue needs to know of them, before there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence


class ObjectGroup(Protocol):
    """A group that moves small objects: what stateless process groups offer."""

    rank: int
    world_size: int

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """``src``'s object, on every rank."""

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank, on every rank."""


class TorchObjectGroup:
    """A torch process group as an `ObjectGroup`; ranks are ranks in the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """``src``'s object, on every rank."""
        box = [obj]
        dist.broadcast_object_list(box, group=self._group, group_src=src)
        return box[0]

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank, on every rank."""
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj, group=self._group)
        return objects


def as_object_group(group: dist.ProcessGroup | ObjectGroup) -> ObjectGroup:
    """``group`` with the two verbs that a rendezvous needs."""
    return TorchObjectGroup(group) if isinstance(group, dist.ProcessGroup) else group


def ranks_beside(group: ObjectGroup, rank: int) -> tuple[int, ...]:
    """The other ranks that can attach to shared memory of ``rank``.

    Collective: yes, every rank. Found out by attaching, not from names or rank arithmetic.

    Raises:
        SharedMemoryError: ``rank`` has too little memory for the attempt; every rank raises.
    """
    probe: Segment | None = None
    offered: SegmentHandle | SharedMemoryError | None = None
    if group.rank == rank:
        try:
            probe = Segment.create(1, "probe")
            offered = probe.handle()
        except SharedMemoryError as error:
            offered = error
    offered = group.broadcast_obj(offered, rank)
    if isinstance(offered, SharedMemoryError):
        raise offered
    attached = group.all_gather_obj(probe is not None or _attaches(offered))
    if probe is not None:
        probe.close()
    return tuple(other for other in range(group.world_size) if attached[other] and other != rank)


def local_and_remote(
    n_reader: int,
    n_local_reader: int,
    local_ranks: Sequence[int] | None,
    remote_ranks: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the readers on this host and those on others are called.

    Raises:
        ValueError: the numbers and names do not fit together.
    """
    local = tuple(range(n_local_reader) if local_ranks is None else local_ranks)
    if remote_ranks is None:
        after = max(local, default=-1) + 1
        remote_ranks = range(after, after + n_reader - n_local_reader)
    remote = tuple(remote_ranks)
    fits = len(local) == n_local_reader and len(local) + len(remote) == n_reader > 0
    if not fits or len({*local, *remote}) != n_reader:
        raise ValueError(
            f"n_reader={n_reader} and n_local_reader={n_local_reader} do not fit the readers "
            f"{local} on this host and {remote} on others"
        )
    return local, remote


def _attaches(handle: SegmentHandle) -> bool:
    try:
        Segment.attach(handle).close()
    except SharedMemoryError:
        return False
    return True
