"""What a board hears of the members that are on other hosts: see `shm_broadcast.board.board`.

`Elsewhere` is written by whoever carries news between the boards of hosts. A board that nobody
carries news to has `OneHost`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shm_broadcast.board.tallies import Tally
    from shm_broadcast.errors import MemberStatus

_SEEN_WITHIN: Final = 0.5
"""Seconds until a member's end has surely been noticed on its own host; a connection to it breaks
earlier."""


class Elsewhere(Protocol):
    """What is known in this process about the members that are on other hosts."""

    def status(self, member: int) -> MemberStatus | None:
        """What ``member`` was last heard to do; None if it is on this host."""

    def tallies(self, member: int) -> Sequence[Tally] | None:
        """What ``member`` was last heard to have come to; None if it is on this host."""

    def gone(self, member: int) -> bool:
        """Whether ``member`` has died or left, or its host has been silent for too long."""

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """A connection with one of ``members`` broke: believe sooner that a silent host is gone.

        Returns:
            A function that returns whether by now it is known which of them has gone, if one has.
        """

    def blame(self, member: int) -> None:
        """Believe that ``member`` has died: somebody has seen it, and aborted the group."""

    def swap(self) -> None:
        """Send this host's news and take in the others', now."""

    def remark(self) -> str:
        """What is wrong with the hosts themselves, for messages; ``""`` if nothing is."""


class OneHost:
    """No member is on another host."""

    def status(self, member: int) -> None:
        """None: every member is on this host."""

    def tallies(self, member: int) -> None:
        """None: every member is on this host."""

    def gone(self, member: int) -> bool:  # noqa: ARG002
        """False: whether a member's process runs is looked up instead."""
        return False

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:  # noqa: ARG002
        """The end of a process on this host is noticed soon."""
        until = time.monotonic() + _SEEN_WITHIN
        return lambda: time.monotonic() >= until

    def blame(self, member: int) -> None:
        """Nothing to note: whether its process runs is looked up."""

    def swap(self) -> None:
        """There is nobody to swap with."""

    def remark(self) -> str:
        """There is nothing to say."""
        return ""
