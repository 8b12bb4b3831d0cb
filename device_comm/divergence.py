"""Compare the collectives of all ranks: before each one in debug mode, else by rolling checksums.

    digest 0 = 0       digest n = CRC-32 of the n-th collective's signature, begun with digest n - 1

Equal calls have equal digests. After a difference, digests differ from there on (CRC-32 over the
same bytes, begun differently, never ends alike). A rank compares a peer's count and digest with its
own digest at that count, if it has reached that count within the last `KEPT` collectives. Otherwise
there is no conclusion, so a reported divergence is always real.

torch's process groups and NCCL compare nothing: after a divergence they hang or return wrong data.
`FingerprintBackend` wraps a backend over these. Each member publishes count and digest on the
board; heartbeats carry those of other hosts, four times a second. A member compares every
`LOOK_SECONDS`, in its next collective and while it waits on the board. So a divergence is reported
within about a second, and wrong data may be used until then. A member that closes the group
publishes this as well: a peer in a collective that it had not begun raises `GroupClosedError`.

`CheckedBackend` compares before each collective, by a small all-gather of its description. It about
doubles the cost of small collectives.

Neither compares messages between two members. `FingerprintBackend` does not compare operations that
are captured into a CUDA graph or replayed.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final
from zlib import crc32

import torch

from device_comm.backend import Backend, Explanation
from device_comm.call_number import VERBS
from device_comm.operation import REDUCTIONS, ROOTED, Operation, ReduceOp
from device_comm.shm.signature import SIGNATURE, signature_of, signature_text
from device_comm.work import Pending
from device_comm.wrappers import Wrapper
from shm_broadcast.atomics import text_of
from shm_broadcast.errors import DivergenceError, GroupClosedError, closed_by
from shm_broadcast.layout import (
    DTYPE_NAMES,
    ENTRY_GROUP_BYTES,
    FINGERPRINT_CLOSED,
    FINGERPRINT_LAST_BYTES,
    FINGERPRINTS,
)
from shm_broadcast.state.board import Board
from shm_broadcast.state.fingerprint import Fingerprint
from shm_broadcast.state.flight_recorder import OperationRecord

KEPT: Final = 1 << 14
"""Collectives whose digests a rank keeps: as many as gloo runs in a second."""

_U32: Final = 0xFFFFFFFF
_WITHIN: Final = KEPT - 1

_ALIKE: Final = frozenset(
    {"all_reduce", "reduce_scatter", "reduce", "all_gather", "gather", "broadcast"}
)
"""The verbs whose inputs have the same size on all ranks."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A divergence between another rank and this one.

    Attributes:
        first, last: the range of numbers of the first different collective, from 1.
        ours: this rank's signature of collective ``last``.
        theirs: the other rank's; ``b""`` unless the number is exact.
    """

    first: int
    last: int
    ours: bytes
    theirs: bytes


class RollingChecksum:
    """The digests of one rank's ``count`` collectives in one group.

    Any thread may compare; one thread at a time may add.
    """

    def __init__(self, world_size: int) -> None:
        self.count = 0
        self._digests = array("I", bytes(4 * KEPT))
        self._called = [b""] * KEPT
        self._agreed = [0] * world_size

    def add(self, signature: bytes) -> int:
        """Count one more collective; return the digest of all."""
        digest = crc32(signature, self._digests[self.count & _WITHIN])
        count = self.count + 1
        self._called[count & _WITHIN] = signature
        self._digests[count & _WITHIN] = digest
        self.count = count
        return digest

    @property
    def last(self) -> bytes:
        """Return the signature of the last collective; ``b""`` if none."""
        return self._called[self.count & _WITHIN]

    def is_ahead_of(self, count: int) -> bool:
        """Return True if this rank called more collectives than ``count``, modulo 2**32."""
        return 0 < (self.count - count) & _U32 < 1 << 31

    def digest(self, number: int) -> int | None:
        """Return the digest of the first ``number`` collectives; None if not available."""
        digest = self._digests[number & _WITHIN]
        # Checked after the load: another thread may have reused the slot.
        return digest if 0 <= number <= self.count < number + _WITHIN else None

    def compare(self, rank: int, told: Fingerprint) -> Mismatch | None:
        """Compare with another rank's fingerprint; return None if equal or inconclusive.

        ``told.last`` may belong to another group, or be torn.
        """
        count = self.count
        number = count - ((count - told.count) & _U32)
        ours = self.digest(number)
        if ours is None or number < 1:
            return None
        if ours == told.digest:
            self._agreed[rank] = max(self._agreed[rank], number)
            return None
        called = self._called[number & _WITHIN]
        theirs = told.last.ljust(SIGNATURE.size, b"\0")
        before = self.digest(number - 1)
        proven = before is not None and crc32(theirs, before) == told.digest
        if proven and len(theirs) == SIGNATURE.size:  # so all earlier collectives were equal
            return Mismatch(number, number, called, theirs)
        return Mismatch(self._agreed[rank] + 1, number, called, b"")


def first_difference(
    ours: Iterable[OperationRecord], theirs: Sequence[OperationRecord], group: str, first: int
) -> tuple[OperationRecord, OperationRecord] | None:
    """Return the first collective that differs in two ranks' recorded operations.

    Both are sorted, oldest first. ``group`` is the group's name in these records, ``first`` the
    lowest number that may differ.
    """
    by_number = {each.number: each for each in theirs if _is_of(each, group)}
    for own in ours:
        other = by_number.get(own.number)
        if own.number >= first and _is_of(own, group) and other and _differ(own, other):
            return own, other
    return None


def _is_of(past: OperationRecord, group: str) -> bool:
    return past.group == group and past.verb not in ("send", "recv")


def _differ(one: OperationRecord, other: OperationRecord) -> bool:
    return (one.verb, one.dtype) != (other.verb, other.dtype) or (
        (one.verb in ROOTED and one.peer != other.peer)
        or (one.verb in _ALIKE and one.size != other.size)
    )


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


class FingerprintBackend(Wrapper):
    """Raises `DivergenceError`, or aborts with it, after members called different collectives.

    Raises `GroupClosedError` if a member closed the group before a collective. Only the latter if
    ``inner`` detects divergence itself.
    """

    def __init__(self, inner: Backend, board: Board, token: bytes) -> None:
        """Wrap ``inner``, which `close` closes; ``token`` is as for `group_number`."""
        has = replace(inner.capabilities, detects_divergence=True)
        super().__init__(inner, capabilities=has)
        self._group = group_number(token)
        self._compares = not inner.capabilities.detects_divergence
        self._board = board
        self._chain = RollingChecksum(self.world_size)
        self._publish, self._entry = (
            board.fingerprints.publish,
            board.fingerprints.allocate(self._group),
        )
        self._last = b""
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
        if operation.verb not in ("send", "recv") and not (self._on_device and _is_captured()):
            signature, chain = signature_of(operation), self._chain
            digest = chain.add(signature)
            if self._entry:
                last = None if signature is self._last else signature[:FINGERPRINT_LAST_BYTES]
                self._publish(self._entry, chain.count, digest, last)
                self._last = signature
            if time.monotonic() >= self._compare_at and (error := self._compare()) is not None:
                raise error
        if operation.moves_nothing and self._compares:
            return None
        return self._inner.start(operation)

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
        for rank, member in enumerate(self.members):
            fingerprints = () if rank == self.rank else self._board.fingerprints.of_member(member)
            for fingerprint in fingerprints:
                error = (
                    self._compare_with(rank, fingerprint)
                    if fingerprint.group == self._group
                    else None
                )
                if error is not None:
                    self._compare_at = math.inf  # the group ends with this error
                    return error
        return None

    def _compare_with(
        self, rank: int, theirs: Fingerprint
    ) -> DivergenceError | GroupClosedError | None:
        mismatch = self._chain.compare(rank, theirs) if self._compares else None
        if mismatch is not None:
            return self._divergence(rank, mismatch)
        closed_early = theirs.closed and self._chain.is_ahead_of(theirs.count)
        if not closed_early or self._board.aborted is not None:  # an abort also closes groups
            return None
        member, verb = self.members[rank], signature_text(self._chain.last).partition(" ")[0]
        error = closed_by(self.identity.operation(verb), self._board.ranks[member])
        self._board.abort(error, member)
        return error

    def _divergence(self, rank: int, mismatch: Mismatch) -> DivergenceError:
        ours, theirs = signature_text(mismatch.ours), "another collective"
        where = f"collective {mismatch.last} of {self.name}"
        if mismatch.theirs:
            theirs = signature_text(mismatch.theirs)
        elif difference := self._in_histories(rank, mismatch):
            ours, theirs = map(past_text, difference)
            where = f"collective {difference[0].number} of {self.name}"
        elif mismatch.first < mismatch.last:
            ours = f"one of its collectives {mismatch.first} to {mismatch.last} of {self.name}"
            where = "checked=True says which"
        return DivergenceError(rank, f"{ours}, {where}", theirs)

    def _in_histories(
        self, rank: int, mismatch: Mismatch
    ) -> tuple[OperationRecord, OperationRecord] | None:
        """Return a difference in the recorded operations; devices number them differently."""
        if self._on_device:
            return None
        group = text_of(self.name.encode()[:ENTRY_GROUP_BYTES])
        ours, theirs = (self._board.recorded(self.members[each]) for each in (self.rank, rank))
        return first_difference(ours, theirs, group, mismatch.first)

    def _leave(self) -> None:
        self._board.fingerprints.comparing.remove(self.poll)
        if self._entry and not self._board.closed:
            self._board.fingerprints.close(self._entry)
            for member in self.peers:
                self._board.notify(member)


def _is_captured() -> bool:
    return torch.cuda.is_current_stream_capturing()


def past_text(past: OperationRecord) -> str:
    """Return an operation as text, such as ``reduce of 8 bytes float32 to rank 0``."""
    words = [past.verb]
    if past.dtype:
        words.append(f"of {past.size} bytes {past.dtype}")
    if past.verb in ROOTED:
        words.append(f"{ROOTED[past.verb]} rank {past.peer}")
    return " ".join(words)


_DIGEST_BYTES = 16
_TEXT_BYTES = 144
"""Members exchange the digest of an operation's description, and its text up to this size."""


class CheckedBackend(Wrapper):
    """Raises `DivergenceError` when members call different collectives."""

    def __init__(self, inner: Backend, over: Backend) -> None:
        """Wrap ``inner``, which `close` closes.

        ``over`` carries the comparison on the CPU: ``inner`` itself, or another backend of the same
        members.
        """
        has = replace(inner.capabilities, detects_divergence=True)
        super().__init__(inner, capabilities=has)
        self._over = over

    def start(self, operation: Operation) -> Pending | None:
        """Compare a collective with the other members', then start it.

        Raises `DivergenceError` for the first member that called another collective.
        """
        if operation.verb not in ("send", "recv"):
            self._agree(operation)
        return None if operation.moves_nothing else self._inner.start(operation)

    def _agree(self, operation: Operation) -> None:
        ours = _row(_describe(operation))
        row = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
        rows = torch.empty((self.world_size, len(ours)), dtype=torch.uint8, device="cpu")
        pending = self._over.start(operation.replace(row, rows, verb="all_gather"))
        if pending is not None:
            pending.wait(operation.deadline)
        for rank, gathered in enumerate(rows):
            theirs = bytes(gathered.numpy())
            if theirs[:_DIGEST_BYTES] != ours[:_DIGEST_BYTES]:
                raise DivergenceError(rank, _text(ours), _text(theirs))


def _row(description: str) -> bytes:
    text = description.encode()
    digest = blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return digest + text[:_TEXT_BYTES].ljust(_TEXT_BYTES)


def _text(row: bytes) -> str:
    return row[_DIGEST_BYTES:].rstrip().decode()


def _describe(operation: Operation) -> str:
    """Return the text that must be equal on all members, without sizes that may differ."""
    verb, words = operation.verb, [str(operation.verb)]
    if verb != "barrier":
        words += [str(operation.buffer.dtype), str(tuple(operation.shape))]
    if verb in REDUCTIONS:
        words.append(operation.op.name)
    if verb in ROOTED:
        words.append(f"{ROOTED[verb]} {operation.peer}")
    elif operation.dim:
        words.append(f"along dim {operation.dim}")
    sizes = operation.output_sizes or operation.source_sizes
    if sizes is not None and verb != "all_to_all":
        words.append(str(list(sizes)))
    return " ".join(words)
