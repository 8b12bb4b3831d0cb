"""How far the host may run ahead of a device that several ranks of one process share.

What was launched and has not begun waits in a queue of the context. Once that is full, launching
blocks, for all threads: a rank that is ahead keeps its peers from launching what it waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD = 256
"""Kernels that ranks as threads have under way together: a quarter of what a queue holds."""


class Pace:
    """Waits for the device every few launches.

    Args:
        wait: returns once all that this rank has launched has ended.
        ranks: how many share the context.
    """

    def __init__(self, wait: Callable[[], object], ranks: int) -> None:
        self._wait = wait
        self._most = AHEAD // ranks
        self._under_way = 0

    def launching(self, kernels: int) -> None:
        """To be called before so many kernels are launched; waits if they were too many."""
        if self._under_way and self._under_way + kernels > self._most:
            self._wait()
            self._under_way = 0
        self._under_way += kernels
