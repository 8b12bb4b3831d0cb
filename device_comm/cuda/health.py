"""What kernels say when they give up, and how they are told to.

Kernels of one rank and its host share a control block (see `device_comm.cuda.abi`). A kernel
that waits too long leaves an error record there; the host looks at it before and behind every
operation, without synchronising with the device, and raises it as an error of this project.

The other way round, a thread waits on the group's board. Once the group is aborted, or a
peer's process has died, it sets the control block's abort word, and whatever waits on the
device ends within microseconds. It makes no call to the device.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

from device_comm.cuda import abi
from device_comm.cuda.abi import ErrorCode, ErrorRecord, Phase
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    CoordinatorError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.watch import Watch

_PHASES = {
    Phase.START: "to come to a collective",
    Phase.END: "to get on with a collective",
    Phase.PACKET: "for its packets",
    Phase.PUT: "to receive",
    Phase.TAKE: "to send",
}

_TELLS = 0.5
"""Seconds that the board has to say why a host has stopped its kernels."""

_JOIN = 1.0
"""Seconds that the thread has to end."""


class Health:
    """The control block of one rank."""

    def __init__(
        self, control: memoryview, watch: Watch, rank: int, members: Sequence[int], name: str
    ) -> None:
        """Start to watch over the kernels.

        Args:
            control: `abi.CONTROL_BYTES` that kernels see.
            watch: over the group.
            rank: this one.
            members: the watch's member number of each rank.
            name: the group's.
        """
        self._control = control
        self._watch = watch
        self._members = members
        self._over = False
        self._thread = threading.Thread(
            target=self._forward,
            args=(f"{name} kernels", [*members[:rank], *members[rank + 1 :]]),
            name=f"{name}-ipc-health",
            daemon=True,
        )
        self._thread.start()

    def check(self, operation: str, timeout: float | None) -> None:
        """Raise what a kernel has found, if one has given up. Costs a load else.

        Args:
            operation: what is going on here, for errors.
            timeout: the seconds that kernels wait, for errors.

        Raises:
            GroupTimeoutError: a rank did not come in time; names it.
            PeerLostError: its process has ended.
            GroupAbortedError: the group was aborted.
            TransportError: the kernels were stopped, and nobody says why.
        """
        if ErrorRecord.read(self._control).code is not ErrorCode.NONE:
            # again: its code is written last
            raise self._explain(ErrorRecord.read(self._control), operation, timeout)

    def abort(self) -> None:
        """Make all kernels of this rank that wait give up, now and from now on."""
        struct.pack_into("<I", self._control, abi.CONTROL_ABORT, 1)

    def close(self) -> None:
        """End the thread. The control block is not used any more; what it says is kept."""
        self._over = True
        if self._watch.member is not None:
            self._watch.ring(self._watch.member)
        self._thread.join(_JOIN)
        self._control = memoryview(bytearray(self._control))

    def _explain(
        self, record: ErrorRecord, operation: str, timeout: float | None
    ) -> CoordinatorError:
        if record.code is ErrorCode.ABORTED or record.culprit == record.reporter:
            # the host of a rank, perhaps another one, has stopped its kernels: it knows why
            cause = self._cause(operation, self._members, _TELLS)
            if isinstance(cause, GroupTimeoutError):
                return TransportError(operation, "the kernels were stopped", record.reporter)
            return cause
        cause = self._cause(operation, [self._members[record.culprit]], 0)
        if not isinstance(cause, GroupTimeoutError):
            return cause
        detail = f"rank {record.reporter} waited for rank {record.culprit} "
        detail += f"{_PHASES[record.phase]}, number {record.epoch}"
        late = cause.waiting_for or (MemberStatus(record.culprit, 0, "busy"),)
        return GroupTimeoutError(operation, timeout, late, detail)

    def _cause(self, operation: str, members: Sequence[int], seconds: float) -> CoordinatorError:
        """What the watch says of ``members``; a `GroupTimeoutError` if all is well."""
        try:
            self._watch.wait(bool, Deadline.after(seconds), operation, lambda: members, spin=0)
        except CoordinatorError as cause:
            return cause
        return GroupTimeoutError(operation, seconds)

    def _forward(self, operation: str, peers: Sequence[int]) -> None:
        try:
            self._watch.wait(lambda: self._over, NEVER, operation, lambda: peers, spin=0)
        except PeerLostError as lost:
            if lost.peer.state != "closed":
                self.abort()
            else:  # it left in good order: the group ends, but nothing has failed
                self._forward(operation, ())
        except CoordinatorError:
            self.abort()


__all__ = ["Health"]
