"""Steps over the slots of a group, in Python: what `device_comm/native/steps.c` does in C.

It keeps the protocol of `device_comm.shm.layout`, whose rules are quoted by number. It is there for
machines without a compiler, and as the readable form of the protocol; no speed is promised.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from device_comm.reduce_op import ReduceOp, reduce_in_rank_order
from device_comm.shm import layout
from device_comm.shm.memory import address_of, copy
from device_comm.shm.plan import ALL_REDUCE, NOTHING, REDUCE, Plan, Span
from device_comm.shm.signature import DTYPE_CODES, with_chunk
from device_comm.shm.steps import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from shm_broadcast.segment import Segment


class _Blocked(NamedTuple):
    """What a plan waits for: to write a step, or for others to arrive at it."""

    step: int
    at_gate: bool


_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class PythonSteps:
    """One rank's steps."""

    def __init__(
        self,
        segment: Segment,
        group: layout.GroupLayout,
        rank: int,
        ring_others: Callable[[], None],
    ) -> None:
        """Work on the slots of ``rank``; ``ring_others`` wakes the other ranks."""
        self._words = segment.words
        self._memory = segment.memory
        self._base = address_of(segment)
        self._layout = group
        self._rank = rank
        self._others = [other for other in range(group.n_ranks) if other != rank]
        self._ring_others = ring_others
        self._begun = 0
        self._all_done = 0
        self._plan: Plan
        self._first = 0
        self._piece = 0
        self._chunks = 0
        self._running: Generator[_Blocked, None, None]
        self._blocked: _Blocked | None = None

    def begin(self, plan: Plan, /) -> None:
        """Take on a plan; the one before is done."""
        group, shared_out = self._layout, plan.kind == ALL_REDUCE
        self._plan = plan
        self._piece = group.piece_bytes if plan.addressed or shared_out else group.slot_bytes
        chunk = self._piece * group.n_ranks if shared_out else self._piece
        self._chunks = max(-(-plan.length // chunk), 1)
        self._first = self._begun + 1
        self._begun += self._chunks + shared_out
        self._blocked = None
        self._running = self._all_reduce() if shared_out else self._exchange()

    def advance(self, spin_ns: int, /) -> int:
        """Go on as far as possible, and look ``spin_ns`` for more: a `Status`."""
        while self._blocked is None or self._unblocked(self._blocked, spin_ns):
            if self.divergent() is not None:
                return Status.DIVERGED
            self._blocked = next(self._running, None)
            if self._blocked is None:
                return Status.DONE
        return Status.BLOCKED

    def ready(self) -> bool:
        """Whether `advance` would get further, after it was blocked."""
        return self._blocked is None or self._unblocked(self._blocked, 0)

    def missing(self) -> list[int]:
        """The ranks that are waited for, after `advance` was blocked."""
        if self._blocked is None:
            return []
        step, at_gate = self._blocked
        if at_gate:
            return [r for r in self._others if self._done(r) + layout.BUFFERS < step]
        return [r for r in self._awaited() if not self._arrived(step, r)]

    def divergent(self) -> tuple[int, bytes, bytes] | None:
        """The first rank that has arrived with another signature; this rank's, and its."""
        if self._blocked is None or self._blocked.at_gate:
            return None
        step = self._blocked.step
        ours = with_chunk(self._plan.signature, step - self._first)
        for rank in self._others:
            if self._arrived(step, rank):
                header = self._slot(step, rank) + layout.SLOT_SIGNATURE
                theirs = bytes(self._memory[header : header + len(ours)])
                if theirs != ours:
                    return rank, ours, theirs
        return None

    # --- the two ways through a plan -----------------------------------------------------

    def _exchange(self) -> Generator[_Blocked, None, None]:
        """Put every chunk one step ahead of taking it: ranks need not run in lockstep."""
        put = taken = 0
        while taken < self._chunks:
            ahead = put < self._chunks and put <= taken + 1
            if ahead and self._may_write(self._first + put):
                self._put(put)
                put += 1
            elif put == taken:
                yield _Blocked(self._first + put, at_gate=True)
            else:
                yield from self._meet(self._first + taken)
                self._take(taken)
                self._finish(self._first + taken)
                taken += 1

    def _all_reduce(self) -> Generator[_Blocked, None, None]:
        """In step i: put the parts of chunk i, reduce one of i - 1, collect those of i - 2."""
        for i in range(self._chunks + 2):
            step = self._first + i
            if i > 0:
                yield from self._meet(step - 1)
            if i <= self._chunks:
                while not self._may_write(step):
                    yield _Blocked(step, at_gate=True)
                if i < self._chunks:
                    self._put_parts(i)
                if i > 0:
                    self._reduce_part(i - 1)
                self._publish(step, i)
            if i > 1:
                self._collect_parts(i - 2)
            if i > 0:
                self._finish(step - 1)

    # --- rules ---------------------------------------------------------------------------

    def _may_write(self, step: int) -> bool:
        """Rule 1."""
        if self._all_done + layout.BUFFERS < step:
            self._all_done = min(self._done(rank) for rank in self._others)
        return self._all_done + layout.BUFFERS >= step

    def _publish(self, step: int, chunk: int) -> None:
        """Rule 2."""
        slot = self._slot(step, self._rank)
        signature = with_chunk(self._plan.signature, chunk)
        self._words.write(slot + layout.SLOT_SIGNATURE, signature)
        self._words.store64(slot + layout.SLOT_ARRIVED, step)
        self._ring_others()

    def _meet(self, step: int) -> Generator[_Blocked, None, None]:
        """Rule 3; `advance` compares the signatures."""
        yield _Blocked(step, at_gate=False)
        while not all(self._arrived(step, rank) for rank in self._awaited()):
            yield _Blocked(step, at_gate=False)
        if step == self._first and sum(self._plan.awaits) == len(self._others):
            self._all_done = max(self._all_done, step - 1)

    def _finish(self, step: int) -> None:
        """Rule 4."""
        self._words.store64(self._layout.rank_line(self._rank) + layout.RANK_DONE, step)
        self._ring_others()

    def _unblocked(self, blocked: _Blocked, spin_ns: int) -> bool:
        step, at_gate = blocked
        if at_gate:
            return self._may_write(step)
        for rank in self._awaited():
            word = self._slot(step, rank) + layout.SLOT_ARRIVED
            seen = self._words.load64(word)
            if seen != step and not self._words.spin64(word, seen, spin_ns):
                return self.divergent() is not None
        return True

    def _awaited(self) -> list[int]:
        return [rank for rank in self._others if self._plan.awaits[rank]]

    def _arrived(self, step: int, rank: int) -> bool:
        return self._words.load64(self._slot(step, rank) + layout.SLOT_ARRIVED) == step

    def _done(self, rank: int) -> int:
        return self._words.load64(self._layout.rank_line(rank) + layout.RANK_DONE)

    def _slot(self, step: int, rank: int) -> int:
        return self._layout.slot(step % layout.BUFFERS, rank)

    def _payload(self, step: int, rank: int) -> int:
        """The address of a slot's payload."""
        return self._base + self._slot(step, rank) + layout.SLOT_HEADER

    # --- moving --------------------------------------------------------------------------

    def _put(self, chunk: int) -> None:
        plan, step, begin = self._plan, self._first + chunk, chunk * self._piece
        to = self._payload(step, self._rank)
        for place, give in enumerate(plan.gives):
            if not (plan.addressed and place == self._rank):
                piece = _part(give, begin, self._piece)
                copy(to + place * self._piece, piece.address, piece.size)
        self._publish(step, chunk)

    def _take(self, chunk: int) -> None:
        plan, begin = self._plan, chunk * self._piece
        if plan.kind == REDUCE:
            target = _part(plan.takes[0], begin, self._piece)
            parts = [
                Span(self._piece_from(chunk, rank), target.size)
                for rank in range(self._layout.n_ranks)
            ]
            if target.size:
                self._reduce(parts, target)
            return
        for rank, take in enumerate(plan.takes):
            target = _part(take, begin, self._piece)
            if target.size:
                copy(target.address, self._piece_from(chunk, rank), target.size)

    def _piece_from(self, chunk: int, rank: int) -> int:
        """The address of what a rank has put for this one."""
        if rank == self._rank:
            return self._plan.own + chunk * self._piece
        mine = self._rank * self._piece if self._plan.addressed else 0
        return self._payload(self._first + chunk, rank) + mine

    def _part_of_chunk(self, chunk: int, rank: int) -> Span:
        """A rank's part of a chunk: where it lies in the whole, and its size."""
        n = self._layout.n_ranks
        begin = chunk * self._piece * n
        size = max(min(self._plan.length - begin, self._piece * n), 0)
        share = -(-size // (n * layout.PIECE_ALIGN)) * layout.PIECE_ALIGN
        part = _part(Span(0, size), rank * share, share)
        return Span(begin + rank * share, part.size)

    def _put_parts(self, chunk: int) -> None:
        to = self._payload(self._first + chunk, self._rank)
        for rank in self._others:
            part = self._part_of_chunk(chunk, rank)
            copy(to + rank * self._piece, self._plan.own + part.address, part.size)

    def _reduce_part(self, chunk: int) -> None:
        part = self._part_of_chunk(chunk, self._rank)
        if not part.size:
            return
        place, step = self._rank * self._piece, self._first + chunk
        pieces = [
            Span(self._payload(step, rank) + place, part.size)
            for rank in range(self._layout.n_ranks)
        ]
        pieces[self._rank] = Span(self._plan.own + part.address, part.size)
        shared = Span(self._payload(step + 1, self._rank) + place, part.size)
        self._reduce(pieces, shared)
        copy(self._plan.takes[0].address + part.address, shared.address, part.size)

    def _collect_parts(self, chunk: int) -> None:
        for rank in self._others:
            part = self._part_of_chunk(chunk, rank)
            reduced = self._payload(self._first + chunk + 1, rank) + rank * self._piece
            copy(self._plan.takes[0].address + part.address, reduced, part.size)

    def _reduce(self, parts: list[Span], target: Span) -> None:
        dtype = _DTYPES[self._plan.dtype]
        tensors = [_tensor(part, dtype) for part in parts]
        reduce_in_rank_order(tensors, ReduceOp(self._plan.op), _tensor(target, dtype))


def _part(span: Span, begin: int, size: int) -> Span:
    """At most ``size`` bytes of a span, from ``begin`` on."""
    if begin >= span.size:
        return NOTHING
    return Span(span.address + begin, min(span.size - begin, size))


def _tensor(span: Span, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * span.size).from_address(span.address)
    return torch.frombuffer(memory, dtype=dtype)
