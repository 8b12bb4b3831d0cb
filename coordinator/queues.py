"""Message queues between the members of a group.

If all members are on one host, the queue uses the group's board, so a lost member or an abort of
the group ends every wait in it. A queue to other hosts, or from outside the group, has a board of
its own, and needs the writer's address and a secret; see `shm_broadcast.MessageQueue`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shm_broadcast import MessageQueue, QueueHandle

if TYPE_CHECKING:
    from coordinator.messages.object_messenger import ObjectMessenger
    from shm_broadcast import Board


class MessengerGroup:
    """A group as an `ObjectGroup`, to set queues up with (`shm_broadcast.queue.rendezvous`).

    Attributes:
        rank: this member's rank in the group.
        world_size: the number of members.
    """

    def __init__(self, messenger: ObjectMessenger) -> None:
        self.rank = messenger.cpu.rank
        self.world_size = messenger.cpu.world_size
        self._messenger = messenger

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return the object of rank ``src``. Collective: yes, every member."""
        return self._messenger.broadcast_object(obj, src, None)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return all members' objects, by rank. Collective: yes, every member."""
        return self._messenger.all_gather_object(obj, None)


def queue_on_board(
    messenger: ObjectMessenger, board: Board, writer_rank: int, *, wanted: bool
) -> MessageQueue | None:
    """Make a queue from one member to all others, on the group's own board.

    Args:
        messenger: the group's messenger; it carries the handle.
        board: the board that all members are on.
        writer_rank: the writer's rank in the group.
        wanted: at the writer: whether to make the queue. The others' value is not used.

    Returns:
        This member's end; None if the writer did not want a queue.

    Collective: yes, every member.
    """
    members = messenger.cpu.members
    writer = members[writer_rank]
    if messenger.cpu.rank == writer_rank:
        readers = [each for each in members if each != writer]
        queue = MessageQueue.on_board(board, writer, readers) if wanted else None
        messenger.broadcast_object(queue and queue.export_handle(), writer_rank, None)
    else:
        handle: QueueHandle | None = messenger.broadcast_object(None, writer_rank, None)
        queue = None if handle is None else MessageQueue.attach(handle, board)
    if queue is not None:
        messenger.cpu.barrier()
    return queue
