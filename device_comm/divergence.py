"""Compare the collectives that the ranks call: early in a debug mode, late by a rolling checksum.

    digest 0 = 0       digest n = CRC-32 of the n-th collective's signature, begun with digest n - 1

Ranks that have called the same have the same digests. Once two have called something else, their
digests differ from there on (CRC-32 over the same bytes, begun differently, never ends alike).

Whoever is told the count and the digest of another rank compares it with its own digest of that
count, if it has come as far and that was not more than `KEPT` collectives ago: which of the two is
further does not matter, nor how old the news are. What cannot be compared says nothing. So ranks
are only said to differ when they have called something else.

Torch's process groups and NCCL compare nothing: if members call different collectives, they hang or
return wrong data. `FingerprintBackend` wraps a backend over these. Each member keeps a checksum of
all its calls in the group (`device_comm.divergence`), and writes count and checksum to the board;
those of members on other hosts come with their beats, four times a second. Each compares its own
with the others' in its next collective once `LOOK_SECONDS` have passed, and while it waits for
anything on the board. So members that differ are told within about a second, but may have used
wrong data until then; `device_comm.divergence` compares before.

Messages between two members, and operations captured into a CUDA graph or replayed, are not
compared.

A member that closes the group says so on the board. A member in a collective that the other one had
not begun by then would wait in vain; it raises `GroupClosedError`.

If members call different collectives, the shared-memory backend raises by itself, but torch's
process groups hang or return wrong data, until `device_comm.divergence` finds it out.
`CheckedBackend` wraps a backend over one of these in its place. It precedes every collective by a
small all-gather of its description, which about doubles the cost of small collectives. Messages
between two members are not compared.
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
"""Of how many collectives a rank knows what its digest was: of as many as gloo does in a second."""

_U32: Final = 0xFFFFFFFF
_WITHIN: Final = KEPT - 1

_ALIKE: Final = frozenset(
    {"all_reduce", "reduce_scatter", "reduce", "all_gather", "gather", "broadcast"}
)
"""The verbs to which all ranks give as many bytes."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where another rank has begun to call something else than this one.

    Attributes:
        first: the number of the first collective of which that may be so; the first is 1.
        last: the number of one behind which they differ; ``first``: it is that one.
        ours: this rank's signature of that one.
        theirs: the other's, of ``first`` if that is ``last``; ``b""``: not known.
    """

    first: int
    last: int
    ours: bytes
    theirs: bytes


class RollingChecksum:
    """The collectives of one rank in one group. Any thread may compare, one at a time may add.

    Attributes:
        count: how many there were.
    """

    def __init__(self, world_size: int) -> None:
        self.count = 0
        self._digests = array("I", bytes(4 * KEPT))
        self._called = [b""] * KEPT
        self._agreed = [0] * world_size

    def add(self, signature: bytes) -> int:
        """Count one more collective; the digest of all."""
        digest = crc32(signature, self._digests[self.count & _WITHIN])
        count = self.count + 1
        self._called[count & _WITHIN] = signature
        self._digests[count & _WITHIN] = digest
        self.count = count
        return digest

    @property
    def last(self) -> bytes:
        """The signature of the last one; ``b""`` if there was none."""
        return self._called[self.count & _WITHIN]

    def is_ahead_of(self, count: int) -> bool:
        """Whether there were more than ``count``, modulo 2**32, of another rank."""
        return 0 < (self.count - count) & _U32 < 1 << 31

    def digest(self, number: int) -> int | None:
        """The digest of the first ``number`` collectives; None: of more, or too long ago."""
        found = self._digests[number & _WITHIN]
        # After that, for meanwhile another thread may have used its place again.
        return found if 0 <= number <= self.count < number + _WITHIN else None

    def compare(self, rank: int, told: Fingerprint) -> Mismatch | None:
        """Compare with what another rank has come to; None: it agrees, or nothing can be said.

        Args:
            rank: the other one.
            told: its tally of this group. `Fingerprint.last` may be of another one, or torn.
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
        if proven and len(theirs) == SIGNATURE.size:  # all before that was alike, then
            return Mismatch(number, number, called, theirs)
        return Mismatch(self._agreed[rank] + 1, number, called, b"")


def first_difference(
    ours: Iterable[OperationRecord], theirs: Sequence[OperationRecord], group: str, first: int
) -> tuple[OperationRecord, OperationRecord] | None:
    """The first collective of which two histories show that ranks have called different ones.

    Args:
        ours: a rank's last operations, the oldest first.
        theirs: another's.
        group: the group's name, as it stands there.
        first: the number of the first collective that may differ.
    """
    there = {each.number: each for each in theirs if _is_of(each, group)}
    for mine in ours:
        other = there.get(mine.number)
        if mine.number >= first and _is_of(mine, group) and other and _differ(mine, other):
            return mine, other
    return None


def _is_of(past: OperationRecord, group: str) -> bool:
    return past.group == group and past.verb not in ("send", "recv")


def _differ(one: OperationRecord, other: OperationRecord) -> bool:
    return (one.verb, one.dtype) != (other.verb, other.dtype) or (
        (one.verb in ROOTED and one.peer != other.peer)
        or (one.verb in _ALIKE and one.size != other.size)
    )


LOOK_SECONDS: Final = 0.1
"""How often to compare."""

_UNMARKED: Final = (
    f"this rank has {FINGERPRINTS} other open groups in which calls are compared; here its calls "
    "are not, and when it closes the group, the others do not learn it"
)
_MEANING: Final = repr((VERBS, DTYPE_NAMES, [op.name for op in ReduceOp], SIGNATURE.format))
"""What signatures mean: members of versions that differ in it do not compare."""


def group_number(token: bytes) -> int:
    """By which the members of a group know it.

    Args:
        token: the same on all members, and on no other group's of any member.
    """
    name = blake2b(token + _MEANING.encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") & ~FINGERPRINT_CLOSED or 1


class FingerprintBackend(Wrapper):
    """Raises `DivergenceError`, or aborts the group with it, when members have called different
    collectives, which is left to a backend that detects it itself; and `GroupClosedError` when one
    has closed the group before a collective.
    """

    def __init__(self, inner: Backend, board: Board, token: bytes) -> None:
        """Wrap a backend, which is closed with this one.

        Args:
            inner: the backend to wrap.
            board: the group's.
            token: the same on all members, and on no other group's of any member.
        """
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
        """Count a collective, compare if it is time to, and start it.

        Raises:
            DivergenceError: names the first member that has called something else before.
            GroupClosedError: names the first that has closed the group before this; it is aborted.
        """
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
        """As ``inner``, and whether the others see what this rank calls."""
        told = super().explain()
        unseen = () if self._entry else (("comparison", _UNMARKED),)
        return replace(told, unavailable=(*told.unavailable, *unseen))

    def poll(self) -> None:
        """Compare if it is time to; abort the group if members have called different collectives,
        or one has closed it before one.

        Any thread may call. Collective: no.
        """
        if time.monotonic() >= self._compare_at and (error := self._compare()) is not None:
            self.fail(error)

    def _compare(self) -> DivergenceError | GroupClosedError | None:
        self._compare_at = time.monotonic() + LOOK_SECONDS
        for rank, member in enumerate(self.members):
            fingerprints = () if rank == self.rank else self._board.fingerprints.of_member(member)
            for told in fingerprints:
                error = self._compare_with(rank, told) if told.group == self._group else None
                if error is not None:
                    self._compare_at = math.inf  # once is enough
                    return error
        return None

    def _compare_with(
        self, rank: int, told: Fingerprint
    ) -> DivergenceError | GroupClosedError | None:
        slip = self._chain.compare(rank, told) if self._compares else None
        if slip is not None:
            return self._divergence(rank, slip)
        missed = told.closed and self._chain.is_ahead_of(told.count)
        if not missed or self._board.aborted is not None:  # it may have closed because of the abort
            return None
        member, verb = self.members[rank], signature_text(self._chain.last).partition(" ")[0]
        error = closed_by(self.identity.operation(verb), self._board.ranks[member])
        self._board.abort(error, member)
        return error

    def _divergence(self, rank: int, slip: Mismatch) -> DivergenceError:
        ours, theirs = signature_text(slip.ours), "another collective"
        where = f"collective {slip.last} of {self.name}"
        if slip.theirs:
            theirs = signature_text(slip.theirs)
        elif found := self._in_histories(rank, slip):
            ours, theirs = map(past_text, found)
            where = f"collective {found[0].number} of {self.name}"
        elif slip.first < slip.last:
            ours = f"one of its collectives {slip.first} to {slip.last} of {self.name}"
            where = "checked=True says which"
        return DivergenceError(rank, f"{ours}, {where}", theirs)

    def _in_histories(
        self, rank: int, slip: Mismatch
    ) -> tuple[OperationRecord, OperationRecord] | None:
        """What two members of this host have called; on a device, numbers are not unique there."""
        if self._on_device:
            return None
        group = text_of(self.name.encode()[:ENTRY_GROUP_BYTES])
        ours, theirs = (self._board.recorded(self.members[each]) for each in (self.rank, rank))
        return first_difference(ours, theirs, group, slip.first)

    def _leave(self) -> None:
        self._board.fingerprints.comparing.remove(self.poll)
        if self._entry and not self._board.closed:
            self._board.fingerprints.close(self._entry)
            for member in self.peers:
                self._board.notify(member)


def _is_captured() -> bool:
    """Ranks need not capture equally often what they replay equally often."""
    return torch.cuda.is_current_stream_capturing()


def past_text(past: OperationRecord) -> str:
    """As `signature_text`, as far as a history has it: ``reduce of 8 bytes float32 to rank 0``."""
    words = [past.verb]
    if past.dtype:
        words.append(f"of {past.size} bytes {past.dtype}")
    if past.verb in ROOTED:
        words.append(f"{ROOTED[past.verb]} rank {past.peer}")
    return " ".join(words)


_DIGEST_BYTES = 16
_TEXT_BYTES = 144
"""What members exchange: the digest of an operation's description, which is compared, and as much
of the text as errors show."""


class CheckedBackend(Wrapper):
    """Raises `DivergenceError` when members call different collectives."""

    def __init__(self, inner: Backend, over: Backend) -> None:
        """Wrap a backend, which is closed with this one.

        Args:
            inner: the backend to wrap.
            over: carries the comparison, on the CPU: ``inner`` itself, or another backend of the
                same members.
        """
        has = replace(inner.capabilities, detects_divergence=True)
        super().__init__(inner, capabilities=has)
        self._over = over

    def start(self, operation: Operation) -> Pending | None:
        """Compare a collective with the other members', then start it.

        Raises:
            DivergenceError: names the first member that called something else.
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
        for rank, theirs in enumerate(rows):
            other = bytes(theirs.numpy())
            if other[:_DIGEST_BYTES] != ours[:_DIGEST_BYTES]:
                raise DivergenceError(rank, _text(ours), _text(other))


def _row(description: str) -> bytes:
    text = description.encode()
    digest = blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return digest + text[:_TEXT_BYTES].ljust(_TEXT_BYTES)


def _text(row: bytes) -> str:
    return row[_DIGEST_BYTES:].rstrip().decode()


def _describe(operation: Operation) -> str:
    """The text that must be equal on all members: without sizes that may differ between them."""
    verb, about = operation.verb, [str(operation.verb)]
    if verb != "barrier":
        about += [str(operation.buffer.dtype), str(tuple(operation.shape))]
    if verb in REDUCTIONS:
        about.append(operation.op.name)
    if verb in ROOTED:
        about.append(f"{ROOTED[verb]} {operation.peer}")
    elif operation.dim:
        about.append(f"along dim {operation.dim}")
    sizes = operation.output_sizes or operation.source_sizes
    if sizes is not None and verb != "all_to_all":
        about.append(str(list(sizes)))
    return " ".join(about)
