"""Objects with a tag: they meet receives with the same tag only, whatever else is under way.

A group's messages arrive in the order sent. Tagged ones therefore go through a group of their own,
of the same members; what comes before the tag that is asked for is kept until it is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from device_comm import Work


@dataclass
class P2PWork:
    """A send under way.

    Attributes:
        work: wait for it.
        payload: None: the work keeps what it sends.
    """

    work: Work[None] | None
    payload: Tensor | None


class _Sender:
    """What has come of one member.

    Attributes:
        kept: what no receive has taken, by tag.
        arrived: held to use these; notified when the thread that receives has done so.
        receiving: whether a thread receives, for all that wait.
    """

    def __init__(self) -> None:
        self.kept: defaultdict[int, deque[Any]] = defaultdict(deque)
        self.arrived = Condition()
        self.receiving = False


class TaggedMail:
    """One member's messages with tags. Threads may send and receive at once."""

    def __init__(self, group: GroupCoordinator) -> None:
        """Use ``group`` for these messages alone."""
        self._group = group
        self._senders: dict[int, _Sender] = {}
        self._sending = Lock()

    def isend(self, obj: Any, dst: int, tag: int) -> P2PWork:
        """Begin to send an object. Collective: no, the two members."""
        with self._sending:
            return P2PWork(self._group.isend_object((tag, obj), dst), None)

    def recv(self, src: int, tag: int) -> Any:
        """The next object of ``src`` with this tag. Collective: no, the two members."""
        sender = self._senders.setdefault(src, _Sender())
        with sender.arrived:
            while tag not in sender.kept:
                if sender.receiving:
                    sender.arrived.wait()
                else:
                    self._receive(sender, src)
            kept = sender.kept[tag]
            obj = kept.popleft()
            if not kept:
                del sender.kept[tag]
            return obj

    def _receive(self, sender: _Sender, src: int) -> None:
        """Take one object in, while others look for theirs among those that have come."""
        sender.receiving = True
        sender.arrived.release()
        try:
            found, obj = self._group.recv_object(src)
        finally:
            sender.arrived.acquire()
            sender.receiving = False
            sender.arrived.notify_all()
        sender.kept[found].append(obj)
