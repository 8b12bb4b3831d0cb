"""Receives in a group with a device of its own, each in its turn.

What a message brings on the device is asked for by the device's communicator, on the caller's
thread, in the caller's order. So a receive begins once the one before has asked for all its
tensors; that is found out when one of them is waited for, or looked at.
"""

from __future__ import annotations

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
        self._before = before
        self._begin = begin
        self._ask = ask
        self._on_cpu: Work[None] | None = None
        self._on_device: Joined | None = None
        self.has_asked()

    def has_asked(self, deadline: Deadline | None = None) -> bool:
        """Whether it has asked for all its tensors; goes on, and waits if there is a deadline."""
        if self._on_device is not None:
            return True
        if self._before is not None and not self._before.has_asked(deadline):
            return False
        self._before = None
        if self._begin is not None:
            self._on_cpu = self._on_cpu or self._begin()
            if deadline is None and not self._on_cpu.is_completed():
                return False
            self._on_cpu.wait(deadline)
        self._on_device = Joined(self._ask())
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
