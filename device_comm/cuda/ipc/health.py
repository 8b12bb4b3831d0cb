"""Reads the errors that kernels record, and makes kernels stop.

A rank's kernels and its host process share a control block (see `device_comm.cuda.launches.abi`).
A kernel that waits too long writes an error record there. The host reads it after the launch of
every operation, without synchronising with the device, and raises it as an error of this project.

In the other direction, a thread waits on the group's board. When the group is aborted, or a peer's
process has died, it sets the control block's abort word, and all kernels that wait end within
microseconds. It makes no CUDA call, which might block.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

from device_comm.cuda.launches import abi
from device_comm.cuda.launches.abi import ErrorCode, ErrorRecord, Phase
from shm_broadcast.atomics import make_words
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

    from device_comm.backend import Identity

_PHASES = {
    Phase.START: "to come to a collective",
    Phase.END: "to get on with a collective",
    Phase.PACKET: "for its packets",
    Phase.PUT: "to receive",
    Phase.TAKE: "to send",
}

_TELLS = 0.5
"""How long to wait until the board says why a rank's kernels were stopped."""

_JOIN = 1.0
"""How long `Health.close` waits for the thread to end."""


class Health:
    """One rank's control block, and the thread that stops its kernels."""

    def __init__(self, control: memoryview, identity: Identity) -> None:
        """Start the thread.

        Args:
            control: the control block, `abi.CONTROL_BYTES` that kernels can access.
            identity: this rank and its group.
        """
        self._control = control
        self._words = make_words(control)
        self._watch = identity.watch
        self._members = identity.members
        self._over = False
        self._thread = threading.Thread(
            target=self._forward,
            args=(identity.operation("kernels"), identity.peers),
            name=f"{identity.name}-ipc-health",
            daemon=True,
        )
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a kernel has recorded an error; costs one load."""
        return self._words.load32(abi.CONTROL_RECORD) != 0

    def check(self, operation: str, timeout: float | None) -> None:
        """Raise the error that a kernel has recorded, if there is one.

        Args:
            operation: the current operation's name, for errors.
            timeout: the kernels' time limit in seconds, for errors.

        Raises:
            GroupTimeoutError: a rank did not come in time; names it.
            PeerLostError: that rank's process has ended.
            GroupAbortedError: the group was aborted.
            TransportError: the kernels were stopped, and the board does not say why.
        """
        # The kernel stores the code last, with release, and `failed` loads it with acquire.
        if self.failed:
            raise self._explain(ErrorRecord.read(self._control), operation, timeout)

    def abort(self) -> None:
        """Stop all waiting kernels of this rank, and later ones as soon as they wait."""
        struct.pack_into("<I", self._control, abi.CONTROL_ABORT, 1)

    def close(self) -> None:
        """End the thread, and keep a copy of the control block, which may be freed afterwards."""
        self._over = True
        if self._watch.member is not None:
            self._watch.ring(self._watch.member)
        self._thread.join(_JOIN)
        self._control = memoryview(bytearray(self._control))
        self._words = make_words(self._control)

    def _explain(
        self, record: ErrorRecord, operation: str, timeout: float | None
    ) -> CoordinatorError:
        if record.code is ErrorCode.ABORTED or record.culprit == record.reporter:
            # Some rank's host process has stopped its kernels: the board will say why.
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
        """The error that the board has about ``members``; `GroupTimeoutError` if it has none."""
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
            else:  # it has closed its end: nothing has failed; go on watching the others
                others = [
                    peer for peer in peers if self._watch.member_status(peer).state != "closed"
                ]
                self._forward(operation, others)
        except CoordinatorError:
            self.abort()
