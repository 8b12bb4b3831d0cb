"""The queues of a group: from one member to all others, and from every member to one.

Members on one host share the group's board, so a lost member or an abort ends their
waiting. A queue that reaches further, or comes from outside the group, has a board of its
own; it needs the writer's address and a secret, as `shm_broadcast.MessageQueue` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shm_broadcast import MessageQueue, QueueHandle

if TYPE_CHECKING:
    from coordinator.objects import ObjectMail
    from shm_broadcast import Board


class MailGroup:
    """A group's mail in the shape that queues meet by (`shm_broadcast.rendezvous`).

    Attributes:
        rank: this member's rank in the group.
        world_size: how many members.
    """

    def __init__(self, mail: ObjectMail) -> None:
        self.rank = mail.cpu.rank
        self.world_size = mail.cpu.world_size
        self._mail = mail

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """``src``'s object. Collective: yes, every member."""
        return self._mail.broadcast_object(obj, src, None)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every member's object, by rank. Collective: yes, every member."""
        return self._mail.all_gather_object(obj, None)


def queue_on_board(
    mail: ObjectMail, board: Board, writer_rank: int, *, wanted: bool
) -> MessageQueue | None:
    """A queue from one member to all others, all of whom are on ``board``.

    Args:
        mail: the group's.
        board: the members'.
        writer_rank: the rank in the group of the member that writes.
        wanted: the writer says whether it wants one; the others need not know.

    Returns:
        This member's end; None if it was not wanted.

    Collective: yes, every member.
    """
    members = mail.cpu.members
    writer = members[writer_rank]
    if mail.cpu.rank == writer_rank:
        readers = [each for each in members if each != writer]
        queue = MessageQueue.on_board(board, writer, readers) if wanted else None
        mail.broadcast_object(queue and queue.export_handle(), writer_rank, None)
    else:
        handle: QueueHandle | None = mail.broadcast_object(None, writer_rank, None)
        queue = None if handle is None else MessageQueue.attach(handle, board)
    if queue is not None:
        mail.cpu.barrier()
    return queue
