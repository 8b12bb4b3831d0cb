"""Compares the members' collectives a little later, without sending messages.

Torch's process groups and NCCL compare nothing: if members call different collectives, they hang or
return wrong data. `LateBackend` wraps a backend over these. Each member keeps a checksum of all its
calls in the group (`device_comm.wrappers.chain`), and writes count and checksum to the board; those
of members on other hosts come with their beats, four times a second. Each compares its own with the
others' in its next collective once `LOOK_SECONDS` have passed, and while it waits for anything on
the board. So members that differ are told within about a second, but may have used wrong data until
then; `device_comm.wrappers.checked` compares before.

Messages between two members, and operations captured into a CUDA graph or replayed, are not
compared.

A member that closes the group says so on the board. A member in a collective that the other one had
not begun by then would wait in vain; it raises `GroupClosedError`.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import torch

from device_comm.begun import VERBS
from device_comm.operation import ROOTED
from device_comm.reduce_op import ReduceOp
from device_comm.shm.signature import SIGNATURE, signature_of, signature_text
from device_comm.wrappers.chain import Chain, first_difference
from device_comm.wrappers.wrapper import Wrapper
from shm_broadcast.board.fixed_text import text_of
from shm_broadcast.errors import DivergenceError, closed_by
from shm_broadcast.layout import (
    DTYPE_NAMES,
    ENTRY_GROUP_BYTES,
    TALLIES,
    TALLY_CLOSED,
    TALLY_LAST_BYTES,
)

if TYPE_CHECKING:
    from device_comm.backend import Backend
    from device_comm.choice import Explanation
    from device_comm.operation import Operation
    from device_comm.work import Pending
    from device_comm.wrappers.chain import Slip
    from shm_broadcast.board.board import Board
    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.tallies import Tally
    from shm_broadcast.errors import GroupClosedError

LOOK_SECONDS: Final = 0.1
"""How often to compare."""

_UNMARKED: Final = (
    f"this rank has {TALLIES} other open groups in which calls are compared; here its calls are "
    "not, and when it closes the group, the others do not learn it"
)
_MEANING: Final = repr((VERBS, DTYPE_NAMES, [op.name for op in ReduceOp], SIGNATURE.format))
"""What signatures mean: members of versions that differ in it do not compare."""


def group_number(token: bytes) -> int:
    """By which the members of a group know it.

    Args:
        token: the same on all members, and on no other group's of any member.
    """
    name = blake2b(token + _MEANING.encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") & ~TALLY_CLOSED or 1


class LateBackend(Wrapper):
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
        self._chain = Chain(self.world_size)
        self._tell, self._entry = board.tallies.tell, board.tallies.take(self._group)
        self._last = b""
        self._compare_at = 0.0
        self._on_device = self.device.type == "cuda"
        board.tallies.comparing.append(self.look)
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
                last = None if signature is self._last else signature[:TALLY_LAST_BYTES]
                self._tell(self._entry, chain.count, digest, last)
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
        return replace(told, refused=(*told.refused, *unseen))

    def look(self) -> None:
        """Compare if it is time to; abort the group if members have called different collectives,
        or one has closed it before one.

        Any thread may call. Collective: no.
        """
        if time.monotonic() >= self._compare_at and (error := self._compare()) is not None:
            self.fail(error)

    def _compare(self) -> DivergenceError | GroupClosedError | None:
        self._compare_at = time.monotonic() + LOOK_SECONDS
        for rank, member in enumerate(self.members):
            tallies = () if rank == self.rank else self._board.tallies.of(member)
            for told in tallies:
                error = self._judge(rank, told) if told.group == self._group else None
                if error is not None:
                    self._compare_at = math.inf  # once is enough
                    return error
        return None

    def _judge(self, rank: int, told: Tally) -> DivergenceError | GroupClosedError | None:
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

    def _divergence(self, rank: int, slip: Slip) -> DivergenceError:
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

    def _in_histories(self, rank: int, slip: Slip) -> tuple[PastOperation, PastOperation] | None:
        """What two members of this host have called; on a device, numbers are not unique there."""
        if self._on_device:
            return None
        group = text_of(self.name.encode()[:ENTRY_GROUP_BYTES])
        ours, theirs = (self._board.past(self.members[each]) for each in (self.rank, rank))
        return first_difference(ours, theirs, group, slip.first)

    def _leave(self) -> None:
        self._board.tallies.comparing.remove(self.look)
        if self._entry and not self._board.closed:
            self._board.tallies.close(self._entry)
            for member in self.peers:
                self._board.ring(member)


def _is_captured() -> bool:
    """Ranks need not capture equally often what they replay equally often."""
    return torch.cuda.is_current_stream_capturing()


def past_text(past: PastOperation) -> str:
    """As `signature_text`, as far as a history has it: ``reduce of 8 bytes float32 to rank 0``."""
    words = [past.verb]
    if past.dtype:
        words.append(f"of {past.size} bytes {past.dtype}")
    if past.verb in ROOTED:
        words.append(f"{ROOTED[past.verb]} rank {past.peer}")
    return " ".join(words)
