"""Waiting for work that is on the device, and raising what its kernels have found."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.driver import Mark
    from device_comm.cuda.order import Passage
    from device_comm.torch_pending import Boundary

POLL = 0.0005
"""Seconds between two looks at what the device has done."""

_GIVES_UP = 0.5
"""Seconds that a kernel may take longer than the host to see that its time is over.

It knows for whom it has waited; the host does not.
"""


class Arrival:
    """Work on a stream that the host waits for; a `Pending`."""

    def __init__(
        self,
        mark: Mark,
        operation: str,
        peers: Sequence[int],
        boundary: Boundary,
        check: Callable[[], None],
    ) -> None:
        """Follow the device.

        Args:
            mark: behind the work.
            operation: for errors.
            peers: the members that it needs.
            boundary: looks at the group.
            check: raises what a kernel has found.
        """
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._boundary = boundary
        self._check = check

    def ready(self) -> bool:
        """Whether the device has done it."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:
        """Return once the device has done it."""
        try:
            self._look(deadline)
        except GroupTimeoutError:
            with suppress(GroupTimeoutError):
                self._look(Deadline.after(_GIVES_UP))
            self._check()
            raise
        self._check()

    def _look(self, deadline: Deadline) -> None:
        self._boundary.wait(self._mark.passed, deadline, self._operation, self._peers, poll=POLL)


class Transfer:
    """A message on a stream of its own; a `Pending`."""

    def __init__(self, passage: Passage, check: Callable[[], None]) -> None:
        """Follow ``passage``; ``check`` raises what a kernel has found."""
        self._passage = passage
        self._check = check

    def ready(self) -> bool:
        """Whether the device has done it."""
        return self._passage.ready()

    def wait(self, deadline: Deadline) -> None:
        """Let the current stream wait for it; the host does not."""
        self._passage.wait(deadline)
        self._check()


__all__ = ["POLL", "Arrival", "Transfer"]
