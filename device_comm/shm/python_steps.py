"""Steps over the memory of a group in Python, for machines without the C extension.

The smallest program that follows the protocol of `device_comm.shm.layout`, whose rules are quoted
by number: one chunk after the other is put, awaited and taken. It is slow, and serves as the
reference for `device_comm/native/steps.c`. All-reduces are not shared out here: a rank without the
extension sees to it that those of its group are not (`device_comm.shm.layout.WHOLE_ALWAYS`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from device_comm.operation import ReduceOp, reduce_in_rank_order
from device_comm.shm import layout
from device_comm.shm.collectives import MOVE, SlotPlan, Status
from device_comm.shm.signature import DTYPE_CODES, with_call, with_chunk
from device_comm.span import NOTHING, Span, address_of, copy_bytes
from shm_broadcast.segment import Segment

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class PythonSteps:
    """One rank's steps: `device_comm.shm.collectives.Steps`."""

    def __init__(
        self,
        segment: Segment,
        group: layout.GroupLayout,
        rank: int,
        notify_others: Callable[[], None],
    ) -> None:
        """Work on the memory of ``rank``; ``notify_others`` wakes the other ranks."""
        self._words = segment.words
        self._memory = segment.memory
        self._base = address_of(segment)
        self._layout = group
        self._rank = rank
        self._others = [other for other in range(group.n_ranks) if other != rank]
        self._notify_others = notify_others
        self._plan: SlotPlan
        self._signature: bytes
        self._piece = self._payload_bytes = 0
        self._place = 0  # in the rings, of the payload of this step, or of the next one there
        self._step = 1  # the one that is next, or under way; steps are counted from 1
        self._first = self._end = 1
        self._arrived_here = False

    def begin(self, plan: SlotPlan, call: int, /) -> None:
        """Take on a plan, in the call of that number; the one before is done."""
        if self._step < self._end:
            raise RuntimeError(
                "another thread is in a call of this group, or one was interrupted when it had "
                "begun"
            )
        self._plan = plan
        self._signature = with_call(plan.signature, call)
        pieces = self._layout.n_ranks if plan.addressed else 1
        self._piece = self._layout.piece_bytes(plan.length, pieces)
        self._payload_bytes = pieces * self._piece
        self._first = self._step
        self._end = self._first + (-(-plan.length // self._piece) if self._piece else 1)

    def advance(self, spin_ns: int, /) -> int:
        """Go on as far as possible, and look ``spin_ns`` for more: a `Status`."""
        while self._step < self._end:
            if not self._arrived_here:
                if self.missing():
                    return Status.BLOCKED
                self._put()
            for rank in self.missing():
                word = self._slot(rank) + layout.SLOT_ARRIVED
                self._words.spin64(word, self._words.load64(word), spin_ns)
            if self.divergent() is not None:
                return Status.DIVERGED
            if self.missing():
                return Status.BLOCKED
            self._take()
        return Status.DONE

    def ready(self) -> bool:
        """Whether `advance` would get further, after it was blocked."""
        return not self.missing() or self.divergent() is not None

    def missing(self) -> list[int]:
        """The ranks that are waited for: to be done with a slot (rule 1), or to arrive (rule 3)."""
        if self._step == self._end:
            return []
        if not self._arrived_here:
            return [r for r in self._others if self._done(r) + layout.BUFFERS < self._step]
        return [r for r in self._others if self._plan.awaits[r] and not self._arrived(r)]

    def divergent(self) -> tuple[int, bytes, bytes] | None:
        """The first rank that has arrived with another signature; this rank's, and its."""
        if not self._arrived_here:
            return None
        ours = with_chunk(self._signature, self._step - self._first)
        for rank in filter(self._arrived, self._others):
            header = self._slot(rank) + layout.SLOT_SIGNATURE
            theirs = bytes(self._memory[header : header + len(ours)])
            if theirs != ours:
                return rank, ours, theirs
        return None

    def _put(self) -> None:
        """Write this rank's slot, and arrive (rule 2)."""
        slot, payload = self._slot(self._rank), self._payload(self._rank)
        begin = (self._step - self._first) * self._piece
        for place, give in enumerate(self._plan.gives):
            if not (self._plan.addressed and place == self._rank):
                piece = _part(give, begin, self._piece)
                copy_bytes(payload + place * self._piece, piece.address, piece.size)
        signature = with_chunk(self._signature, self._step - self._first)
        self._words.write(slot + layout.SLOT_SIGNATURE, signature)
        self._words.store64(slot + layout.SLOT_ARRIVED, self._step)
        self._notify_others()
        self._arrived_here = True

    def _take(self) -> None:
        """Use what has arrived, and be done with this step (rule 4)."""
        begin = (self._step - self._first) * self._piece
        targets = [_part(take, begin, self._piece) for take in self._plan.takes]
        if self._plan.kind == MOVE:
            for rank, target in enumerate(targets):
                if target.size:
                    copy_bytes(target.address, self._piece_from(rank, begin), target.size)
        elif targets[0].size:
            self._reduce(targets[0], begin)
        self._words.store64(self._layout.rank_line(self._rank) + layout.RANK_DONE, self._step)
        self._notify_others()
        if self._in_rings:
            self._place = self._layout.next_place(self._place, self._payload_bytes)
        self._step += 1
        self._arrived_here = False

    def _reduce(self, target: Span, begin: int) -> None:
        dtype = _DTYPES[self._plan.dtype]
        parts = [
            _tensor(Span(self._piece_from(rank, begin), target.size), dtype)
            for rank in range(self._layout.n_ranks)
        ]
        reduce_in_rank_order(parts, ReduceOp(self._plan.op), _tensor(target, dtype))

    def _piece_from(self, rank: int, begin: int) -> int:
        """The address of what a rank has put for this one."""
        if rank == self._rank:
            return self._plan.own + begin
        mine = self._rank * self._piece if self._plan.addressed else 0
        return self._payload(rank) + mine

    def _arrived(self, rank: int) -> bool:
        return self._words.load64(self._slot(rank) + layout.SLOT_ARRIVED) == self._step

    def _done(self, rank: int) -> int:
        return self._words.load64(self._layout.rank_line(rank) + layout.RANK_DONE)

    @property
    def _in_rings(self) -> bool:
        return self._payload_bytes > self._layout.inside_bytes

    def _payload(self, rank: int) -> int:
        """The address of a rank's payload in this step."""
        if self._in_rings:
            return self._base + self._layout.ring(rank) + self._place
        return self._base + self._slot(rank) + layout.SLOT_HEADER

    def _slot(self, rank: int) -> int:
        return self._layout.slot(self._step % layout.BUFFERS, rank)


def _part(span: Span, begin: int, size: int) -> Span:
    """At most ``size`` bytes of a span, from ``begin`` on."""
    if begin >= span.size:
        return NOTHING
    return Span(span.address + begin, min(span.size - begin, size))


def _tensor(span: Span, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * span.size).from_address(span.address)
    return torch.frombuffer(memory, dtype=dtype)
