"""Exchange the facts from which the ranks of a process group make a queue: host and handle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from shm_broadcast.arguments import integer, integers
from shm_broadcast.errors import DRIVER_RANK, ForeignMemoryError, SharedMemoryError
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_MOST_READERS: Final = 4096
"""Limits the board's memory, 0.14 MiB per member, if a number is mistyped."""


@runtime_checkable
class ObjectGroup(Protocol):
    """A group that can exchange small objects, as vLLM's stateless process groups can.

    Both methods are collective: yes, every rank.
    """

    rank: int
    world_size: int

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return, on every rank, the object of rank ``src``."""

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return, on every rank, the list of all ranks' objects, in rank order."""


def as_object_group(group: ProcessGroup | ObjectGroup) -> ObjectGroup:
    """Return ``group`` itself, or an adapter if it is a torch process group."""
    if isinstance(group, ObjectGroup):
        return group
    from shm_broadcast.queue.torch_rendezvous import TorchObjectGroup  # noqa: PLC0415

    return TorchObjectGroup(group)


def ranks_beside(group: ObjectGroup, rank: int) -> tuple[int, ...]:
    """Return the other ranks that can attach to shared memory of ``rank``.

    Collective: yes, every rank. Each rank tries to attach: host names and rank arithmetic are no
    proof (containers of one host may or may not share memory).

    Raises:
        SharedMemoryError: ``rank`` has too little memory for the attempt; every rank raises.
        ForeignMemoryError: a rank received a handle from outside the group; every rank raises.
    """
    offered: SegmentHandle | SharedMemoryError | None = None
    with ExitStack() as attempt:
        if group.rank == rank:
            try:
                offered = attempt.enter_context(Segment.create(1, "probe")).handle()
            except SharedMemoryError as error:
                offered = error
        offered = group.broadcast_obj(offered, rank)
        if isinstance(offered, SharedMemoryError):
            raise offered
        attached = group.all_gather_obj(group.rank == rank or _attaches(offered))
    for answer in attached:
        if isinstance(answer, ForeignMemoryError):
            raise answer
    return tuple(other for other in range(group.world_size) if attached[other] and other != rank)


def local_and_remote(
    n_reader: int,
    n_local_reader: int,
    local_ranks: Sequence[int] | None,
    remote_ranks: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the readers on this host and on others, with defaults filled in.

    The arguments are those of `MessageQueue`. Raises TypeError if one is no whole number, and
    ValueError if they contradict each other, exceed 4096 readers, or repeat a rank.
    """
    n_reader = integer("n_reader", n_reader, _MOST_READERS, least=0)
    n_local_reader = integer("n_local_reader", n_local_reader, _MOST_READERS, least=0)
    if local_ranks is None:
        local_ranks = range(n_local_reader)
    local = integers("local_reader_ranks", local_ranks, least=DRIVER_RANK)
    if remote_ranks is None:
        after = max(local, default=-1) + 1
        remote_ranks = range(after, after + n_reader - n_local_reader)
    remote = integers("remote_reader_ranks", remote_ranks, least=DRIVER_RANK)
    every = [*local, *remote]
    if len({*every}) < len(every):
        twice = next(rank for rank in every if every.count(rank) > 1)
        raise ValueError(f"reader {twice} occurs twice: {local} on this host, {remote} on others")
    if len(local) != n_local_reader or len(every) != n_reader:
        raise ValueError(
            f"n_reader={n_reader} and n_local_reader={n_local_reader} do not fit the readers "
            f"{local} on this host and {remote} on others"
        )
    return local, remote


def _attaches(handle: SegmentHandle) -> bool | ForeignMemoryError:
    try:
        Segment.attach(handle).close()
    except ForeignMemoryError as error:  # the handle is from outside the group
        return error
    except SharedMemoryError:
        return False
    return True
