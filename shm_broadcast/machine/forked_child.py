"""What a process has joined does not belong to the children that it forks.

A child made by `os.fork` holds copies of its parent's ends: cursors, counters and message numbers,
but not the threads that advance them. If both used them, one would take messages meant for the
other. So in a child they refuse to work, and closing them there touches nothing shared.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Final, Protocol
from weakref import WeakSet

DISOWNED: Final = "it belongs to the process that this one was forked from"
"""Why calls of a forked child are refused."""


class Inherited(Protocol):
    """Something that one process has joined, and no child of it."""

    def disown(self) -> None:
        """Refuse from now on: this is a forked child. It has one thread."""


_inherited: Final[WeakSet[Inherited]] = WeakSet()
"""All that this process has joined and that is still in use."""


def disown_in_children(inherited: Inherited) -> None:
    """Have ``inherited`` told in every child that this process forks."""
    _inherited.add(inherited)


class Closing(ExitStack):
    """What a process gives back when it closes something. A forked child gives nothing back."""

    def __init__(self) -> None:
        super().__init__()
        disown_in_children(self)

    def disown(self) -> None:
        """In a forked child: close nothing, and free nothing, which might wait for threads."""
        self._parents = self.pop_all()


def _disown_all() -> None:
    for inherited in tuple(_inherited):
        inherited.disown()
    _inherited.clear()


os.register_at_fork(after_in_child=_disown_all)
