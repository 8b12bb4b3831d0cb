"""Objects with a tag: they meet receives with the same tag only, whatever else is under way.

A group's messages arrive in the order sent. Tagged ones therefore go through a group of their own,
of the same members; what comes before the tag that is asked for is kept until it is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.group import GroupCoordinator


class Waitable(Protocol):
    """What is under way."""

    def wait(self) -> Any:
        """Return once it is done."""

    def is_completed(self) -> bool:
        """Whether it is."""


@dataclass
class P2PWork:
    """A send under way.

    Attributes:
        work: wait for it.
        payload: None: the work keeps what it sends.
    """

    work: Waitable | None
    payload: Tensor | None


class TaggedMail:
    """One member's messages with tags."""

    def __init__(self, group: GroupCoordinator) -> None:
        """Use ``group`` for these messages alone."""
        self._group = group
        self._kept: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def isend(self, obj: Any, dst: int, tag: int) -> P2PWork:
        """Begin to send an object. Collective: no, the two members."""
        return P2PWork(self._group.isend_object((tag, obj), dst), None)

    def recv(self, src: int, tag: int) -> Any:
        """The next object of ``src`` with this tag. Collective: no, the two members."""
        kept = self._kept[src, tag]
        while not kept:
            found, obj = self._group.recv_object(src)
            self._kept[src, found].append(obj)
        return kept.popleft()
