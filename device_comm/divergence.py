"""Compare the collectives of all ranks by rolling checksums, and before each one if ``checked``.

    digest 0 = 0       digest n = `next_digest` (digest n - 1, the n-th collective's signature)

Equal calls have equal digests. After a difference, digests differ from there on. A rank compares a
peer's count and digest with its own digest at that count, if it has reached that count within the
last `DIGESTS` collectives. Otherwise there is no conclusion, so a reported divergence is always
real.

torch's process groups and NCCL compare nothing: after a divergence they hang or return wrong data.
`FingerprintBackend` wraps a backend over these. Each member publishes its last collectives on the
board; heartbeats carry those of other hosts, four times a second. A member compares each collective
with members on its host that have begun one of that number: most divergences are reported before
data move. It compares with all members every `LOOK_SECONDS`, in its next collective and while it
waits on the board. So any divergence is reported within about a second, and wrong data may be used
until then. A member that closes the group publishes this as well: a peer in a collective that it
had not begun raises `GroupClosedError`.

With ``checked=True`` it also compares before each collective, by an all-gather of the signatures:
no data move before all members have called the same. This about doubles the cost of small
collectives.

Messages between two members are not compared, nor operations that are captured into a CUDA graph or
replayed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Final

import torch

from device_comm.backend import Backend, Explanation
from device_comm.call_number import VERBS, CollectiveLog, log_memory
from device_comm.operation import Operation, ReduceOp
from device_comm.shm.signature import SIGNATURE, collective_text, signature_with_sizes
from device_comm.work import Pending
from device_comm.wrappers import Wrapper
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DivergenceError, GroupClosedError, GroupTimeoutError, closed_by
from shm_broadcast.layout import DTYPE_NAMES, FINGERPRINT_CLOSED, FINGERPRINTS
from shm_broadcast.state.board import Board
from shm_broadcast.state.fingerprint import Fingerprint

DIGESTS: Final = 1 << 14
"""Collectives whose digests a rank keeps: as many as gloo runs in a second."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A divergence between another rank and this one.

    Attributes:
        first, last: the range of numbers of the first different collective, from 1.
        ours, theirs: the ranks' signatures of it; ``b""`` unless the number is exact.
    """

    first: int
    last: int
    ours: bytes
    theirs: bytes


class ComparedLog(CollectiveLog):
    """A log of all collectives in a group, compared with other ranks' logs."""

    def __init__(self, world_size: int) -> None:
        super().__init__(log_memory(DIGESTS))
        self._agreed = [0] * world_size

    def compare(self, rank: int, theirs: CollectiveLog) -> Mismatch | None:
        """Compare with another rank's log; return None if equal or inconclusive.

        ``theirs`` may belong to another group, or be torn.
        """
        last = first = min(self.count, theirs.count)
        ours = self.digest(last)
        if last == 0 or ours is None or not theirs.is_proven(last):
            return None
        if ours == theirs.digest(last):
            self._agreed[rank] = max(self._agreed[rank], last)
            return None
        while (before := theirs.digest(first - 1)) not in (None, self.digest(first - 1)):
            first -= 1
        if before is not None and theirs.is_proven(first):
            return Mismatch(first, first, self.signature(first), theirs.signature(first))
        return Mismatch(self._agreed[rank] + 1, last, b"", b"")


LOOK_SECONDS: Final = 0.1
"""Seconds between two comparisons."""

_UNMARKED: Final = (
    f"this rank has {FINGERPRINTS} other open groups in which calls are compared; in this group it "
    "publishes neither its calls nor its close"
)
_MEANING: Final = repr((VERBS, DTYPE_NAMES, [op.name for op in ReduceOp], SIGNATURE.format))
"""The encoding of signatures: members of versions with other encodings do not compare."""


def group_number(token: bytes) -> int:
    """Return the number that identifies a group on the board.

    ``token`` is the same on all members and differs between all groups of a member.
    """
    name = blake2b(token + _MEANING.encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") & ~FINGERPRINT_CLOSED or 1


class NumberedPending:
    """A collective whose timeout names only members that have not begun it."""

    def __init__(
        self, pending: Pending, late_only: Callable[[GroupTimeoutError], GroupTimeoutError]
    ) -> None:
        self._pending = pending
        self._late_only = late_only
        self.ready = pending.ready

    def wait(self, deadline: Deadline) -> None:
        """Wait for the collective."""
        try:
            self._pending.wait(deadline)
        except GroupTimeoutError as error:
            raise self._late_only(error) from error.__cause__


class FingerprintBackend(Wrapper):
    """Raises `DivergenceError`, or aborts with it, after members called different collectives.

    Raises `GroupClosedError` if a member closed the group before a collective.
    """

    def __init__(
        self, inner: Backend, board: Board, token: bytes, over: Backend | None = None
    ) -> None:
        """Wrap ``inner``, which `close` closes; ``token`` is as for `group_number`.

        ``over``, a CPU backend of the same members, compares before each collective; None: later.
        """
        has = replace(inner.capabilities, detects_divergence=True)
        super().__init__(inner, capabilities=has)
        self._group = group_number(token)
        self._over = over
        self._board = board
        self._log = ComparedLog(self.world_size)
        self._entry = board.fingerprints.allocate(self._group)
        self._local: list[int] = []  # the entries of members on this host
        self._compare_at = 0.0
        self._on_device = self.device.type == "cuda"
        board.fingerprints.comparing.append(self.poll)
        self._closing.callback(self._leave)

    def start(self, operation: Operation) -> Pending | None:
        """Count a collective, compare if due, and start it.

        Raises `DivergenceError` or `GroupClosedError` for the first member that called another
        collective, or closed the group, before.
        """
        # Not in captures: ranks may capture a different number of times.
        counts = operation.verb not in ("send", "recv")
        if counts and self._on_device:
            counts = not torch.cuda.is_current_stream_capturing()
        if counts:
            signature = signature_with_sizes(operation)
            digest, number = self._log.add(signature), self._log.count
            fingerprints = self._board.fingerprints
            if self._entry:
                fingerprints.publish(self._entry, number, digest, signature)
            if fingerprints.differs(self._local, number, digest):
                self._compare_at = 0.0
            if time.monotonic() >= self._compare_at and (error := self._compare()) is not None:
                raise error
            if self._over is not None:
                self._compare_first(operation, signature, self._over)
        if operation.moves_nothing:
            return None
        pending = self._inner.start(operation)
        if pending is None or not counts:
            return pending
        return NumberedPending(pending, partial(self._late_only, self._log.count))

    def _compare_first(self, operation: Operation, signature: bytes, over: Backend) -> None:
        row = torch.frombuffer(bytearray(signature), dtype=torch.uint8)
        rows = torch.empty((self.world_size, len(signature)), dtype=torch.uint8, device="cpu")
        number = self._log.count
        pending = over.start(operation.replace(row, rows, verb="all_gather"))
        if pending is not None:
            NumberedPending(pending, partial(self._late_only, number)).wait(operation.deadline)
        for rank, theirs in enumerate(bytes(each.numpy()) for each in rows):
            if theirs != signature:
                raise self._divergence(rank, Mismatch(number, number, signature, theirs))

    def explain(self) -> Explanation:
        """Add the reason if peers cannot compare this rank's calls."""
        explanation = super().explain()
        uncompared = () if self._entry else (("comparison", _UNMARKED),)
        return replace(explanation, unavailable=(*explanation.unavailable, *uncompared))

    def poll(self) -> None:
        """Compare if due; abort the group on a failed comparison. Any thread may call."""
        if time.monotonic() >= self._compare_at and (error := self._compare()) is not None:
            self.fail(error)

    def _compare(self) -> DivergenceError | GroupClosedError | None:
        self._compare_at = time.monotonic() + LOOK_SECONDS
        fingerprints, group = self._board.fingerprints, self._group
        entries = [fingerprints.local_entry(group, member) for member in self.peers]
        self._local = [entry for entry in entries if entry]
        for rank, member in enumerate(self.members):
            theirs = fingerprints.of_group(group, member)
            if rank == self.rank or theirs is None:
                continue
            error = self._compare_with(rank, theirs)
            if error is not None:
                self._compare_at = math.inf  # the group ends with this error
                return error
        return None

    def _late_only(self, number: int, error: GroupTimeoutError) -> GroupTimeoutError:
        """Return ``error`` without the members that have begun collective ``number``."""
        self._board.refresh_remote()
        late = []
        for member in self.peers:
            theirs = self._board.fingerprints.of_group(self._group, member)
            if theirs is None or CollectiveLog(bytearray(theirs.log)).count < number:
                late.append(self._board.member_status(member))
        late_members = tuple(late) or error.waiting_for
        return GroupTimeoutError(error.operation, error.timeout, late_members, error.detail)

    def _compare_with(
        self, rank: int, theirs: Fingerprint
    ) -> DivergenceError | GroupClosedError | None:
        log = CollectiveLog(bytearray(theirs.log))
        mismatch = self._log.compare(rank, log)
        if mismatch is not None:
            return self._divergence(rank, mismatch)
        closed_early = theirs.closed and log.count < self._log.count
        if not closed_early or self._board.aborted is not None:  # an abort also closes groups
            return None
        member, verb = self.members[rank], VERBS[self._log.signature(self._log.count)[0]]
        error = closed_by(self.identity.operation(verb), self._board.ranks[member])
        self._board.abort(error, member)
        return error

    def _divergence(self, rank: int, mismatch: Mismatch) -> DivergenceError:
        if not mismatch.theirs:
            ours = f"one of its collectives {mismatch.first} to {mismatch.last} of {self.name}"
            return DivergenceError(rank, f"{ours}, checked=True says which", "another collective")
        ours, theirs = collective_text(mismatch.ours), collective_text(mismatch.theirs)
        theirs += " of other sizes" if theirs == ours else ""
        return DivergenceError(rank, f"{ours}, collective {mismatch.last} of {self.name}", theirs)

    def _leave(self) -> None:
        self._board.fingerprints.comparing.remove(self.poll)
        if self._entry and not self._board.closed:
            self._board.fingerprints.close(self._entry)
            for member in self.peers:
                self._board.notify(member)
