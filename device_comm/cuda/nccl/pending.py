"""The `Pending` objects of NCCL operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shm_broadcast.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.device.streams import StreamMark
    from device_comm.cuda.nccl.batch import MessageBatch
    from device_comm.torch_group.pending import Boundary
    from shm_broadcast.deadline import Deadline

NCCL_POLL_SECONDS: Final = 0.001
"""Seconds between two looks at NCCL's or the device's progress."""


class NcclArrival:
    """An operation whose `wait` blocks the host, such as a barrier."""

    def __init__(
        self, mark: StreamMark, operation: str, peers: Sequence[int], boundary: Boundary
    ) -> None:
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._boundary = boundary

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:
        """Block until the device is done; raise at the deadline, on an abort or a lost peer."""
        self._boundary.wait(
            self._mark.passed, deadline, self._operation, self._peers, poll=NCCL_POLL_SECONDS
        )
        # The mark is also passed when an abort has ended the operation.
        self._boundary.watch.check(self._operation)


class Underway:
    """A message of a batch that may not have been issued yet."""

    def __init__(self, batch: MessageBatch, release: Callable[[MessageBatch], None]) -> None:
        self._batch = batch
        self._release = release

    def ready(self) -> bool:
        """Whether the device is done, or the message could not be issued."""
        mark = self._issued()
        return mark is None or mark.passed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Have the current stream wait for the message."""
        mark = self._issued()
        if mark is None:
            raise self._batch.error or GroupClosedError("the message was never issued")
        mark.follow()

    def _issued(self) -> StreamMark | None:
        if self._batch.mark is None and self._batch.error is None:
            self._release(self._batch)
        return self._batch.mark
