"""Receives, one after the other, in a group with its own device.

A message's tensors on the device are received by the device's communicator, on the caller's thread,
in the caller's order. So a receive begins once the one before has asked for all its tensors; this
is checked when one of them is waited for, or inspected.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from device_comm import Joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm import Work
    from shm_broadcast import Deadline


class Turn:
    """One receive; a `device_comm.Pending`."""

    def __init__(
        self,
        before: Turn | None,
        begin: Callable[[], Work[None]] | None,
        ask: Callable[[], Sequence[Work[Any]]],
    ) -> None:
        """Receive behind ``before``.

        Args:
            before: the receive from the same peer that was begun before this one.
            begin: begins to receive what is on the CPU, if anything is.
            ask: asks for what is on the device, once that is there.
        """
        self._begin = begin
        self._ask = ask
        self._on_cpu: Work[None] | None = None
        self._on_device: Joined | None = None
        # Those that have not asked for all their tensors, in their order.
        self._line: deque[Turn] = deque() if before is None else before._line
        self._line.append(self)
        self.has_asked()

    def has_asked(self, deadline: Deadline | None = None) -> bool:
        """Whether it has asked for all its tensors; goes on, and waits if there is a deadline."""
        while self._on_device is None:
            if not self._line[0]._asks(deadline):
                return False
            self._line.popleft()
        return True

    def ready(self) -> bool:
        """Whether everything is there. Never blocks."""
        return self.has_asked() and self._on_device is not None and self._on_device.ready()

    def wait(self, deadline: Deadline) -> None:
        """Return once everything is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
        self.has_asked(deadline)
        if self._on_device is not None:
            self._on_device.wait(deadline)

    def _asks(self, deadline: Deadline | None) -> bool:
        if self._begin is not None:
            self._on_cpu = self._on_cpu or self._begin()
            if deadline is None and not self._on_cpu.is_completed():
                return False
            self._on_cpu.wait(deadline)
        self._on_device = Joined(self._ask())
        return True
