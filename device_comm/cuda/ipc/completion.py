"""Waits for work on the device, and raises the errors that kernels have recorded."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.device.streams import StreamMark
    from device_comm.torch_group.pending import Boundary

_POLL_SECONDS = 0.0005
"""Seconds between two looks at the device's progress."""

_GIVES_UP = 0.5
"""How long the host waits, after its own deadline, for a kernel to record its time-out.

The kernel knows which rank it has waited for; the host does not.
"""


class StreamCompletion:
    """A `Pending` whose `wait` blocks the host until the device has done the work."""

    def __init__(
        self,
        mark: StreamMark,
        operation: str,
        peers: Sequence[int],
        boundary: Boundary,
        check: Callable[[], None],
    ) -> None:
        """Wait for work on a stream.

        Args:
            mark: the point in the stream right after the work.
            operation: the operation's name, for errors.
            peers: the member numbers of the ranks that it needs.
            boundary: waits while watching the group.
            check: raises the error that a kernel has recorded, if there is one.
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
        """Wait until the device has done the work."""
        try:
            self._look(deadline)
        except GroupTimeoutError:  # the kernel's own error is better: it names the late rank
            with suppress(GroupTimeoutError):
                self._look(Deadline.after(_GIVES_UP))
            self._check()
            raise
        self._check()

    def _look(self, deadline: Deadline) -> None:
        self._boundary.wait(
            self._mark.passed, deadline, self._operation, self._peers, poll=_POLL_SECONDS
        )
