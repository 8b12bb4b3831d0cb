"""What the primitives of NCCL hand back while the device is at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shm_broadcast.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.nccl_messages import Batch
    from device_comm.cuda.streams import Mark
    from device_comm.torch_pending import Boundary
    from shm_broadcast.deadline import Deadline

POLL: Final = 0.001
"""Seconds between two looks at what NCCL or the device does."""


class Passage:
    """An operation on a stream, for a caller who may be on another one."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Let the current stream wait for it."""
        self._mark.follow()


class Arrival:
    """An operation that the host waits for, as at a barrier."""

    def __init__(
        self, mark: Mark, operation: str, peers: Sequence[int], boundary: Boundary
    ) -> None:
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._boundary = boundary

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:
        """Wait for the device, in a way that ends."""
        self._boundary.wait(self._mark.passed, deadline, self._operation, self._peers, poll=POLL)
        # The end of an operation by an abort lets the device pass, too.
        self._boundary.watch.check(self._operation)


class Underway:
    """A message of a batch that may not have been issued yet."""

    def __init__(self, batch: Batch, release: Callable[[Batch], None]) -> None:
        self._batch = batch
        self._release = release

    def ready(self) -> bool:
        """Whether the device is done, or never will be."""
        mark = self._issued()
        return mark is None or mark.passed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Let the current stream wait for it."""
        mark = self._issued()
        if mark is None:
            raise self._batch.error or GroupClosedError("the message was never issued")
        mark.follow()

    def _issued(self) -> Mark | None:
        if self._batch.mark is None and self._batch.error is None:
            self._release(self._batch)
        return self._batch.mark
