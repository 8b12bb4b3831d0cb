"""Collectives as plans: what one rank puts and takes. Pure functions over addresses.

A plan is carried out chunk by chunk through the memory of the group (see `device_comm.shm.layout`),
by the C extension or by `device_comm.shm.collectives.python_steps`; both take the same plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from device_comm.shm.signature import DTYPE_CODES, NO_OP
from device_comm.span import NOTHING, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from device_comm.reduce_op import ReduceOp

MOVE: Final = 0
"""What comes is copied: from rank r into ``takes[r]``."""
REDUCE: Final = 1
"""What comes is reduced in rank order, with this rank's own, into ``takes[0]``."""
ALL_REDUCE: Final = 2
"""As `REDUCE`, but each rank reduces one part, and the parts are shared out."""


class SlotPlan(NamedTuple):
    """What one rank does in one collective.

    Attributes:
        kind: `MOVE`, `REDUCE` or `ALL_REDUCE`.
        signature: what all ranks must agree on.
        awaits: by rank, 1 if this rank needs what that one puts; 0 for itself.
        dtype: the code of the elements, for reductions.
        op: the reduction, or `NO_OP`.
        length: bytes of the longest piece that any rank puts; the same on all ranks.
        gives: what this rank puts: one span for all ranks, or one for each; none at all.
        takes: where what comes goes.
        addressed: ranks put a piece for each rank, not one for all; the same on all ranks.
        own: the address of what this rank has for itself.
    """

    kind: int
    signature: bytes
    awaits: bytes
    dtype: int
    op: int
    length: int
    gives: tuple[Span, ...]
    takes: tuple[Span, ...]
    addressed: bool
    own: int


class SlotPlanner:
    """Makes the plans of one rank. Tensors are contiguous; sizes are in elements.

    Each is given the signature of what it plans.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._n = world_size
        everyone = range(world_size)
        self._everyone = bytes(other != rank for other in everyone)
        self._nobody = bytes(world_size)
        self._only_rank = [bytes(other == root for other in everyone) for root in everyone]

    def barrier(self, signature: bytes) -> SlotPlan:
        """Meet, and move nothing."""
        return self._move(signature, self._everyone, 0)

    def all_reduce(
        self, signature: bytes, output: Tensor, source: Tensor, op: ReduceOp, whole_bytes: int
    ) -> SlotPlan:
        """Reduce all ``source``; those of up to ``whole_bytes`` in one step."""
        kind = REDUCE if source.nbytes <= whole_bytes else ALL_REDUCE
        return self._reduce(signature, output, source, op, (Span.of(source),), kind=kind)

    def all_gather(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int]
    ) -> SlotPlan:
        """Put all ``source``, of which rank r's has ``sizes[r]``, in a row."""
        return self._gather(signature, output, source, sizes, (Span.of(source),))

    def reduce_scatter(
        self, signature: bytes, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> SlotPlan:
        """Reduce this rank's part of all ``source``, whose part r has ``sizes[r]``."""
        gives = _parts(source, sizes)
        return self._reduce(
            signature,
            output,
            source,
            op,
            gives,
            length=max(sizes) * source.itemsize,
            addressed=True,
            own=gives[self._rank].address,
        )

    def all_to_all(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        longest: int,
    ) -> SlotPlan:
        """Give part r to rank r, put what rank r gives in part r; ``longest`` of all parts."""
        gives = _parts(source, source_sizes)
        return self._move(
            signature,
            self._everyone,
            longest * source.itemsize,
            gives=gives,
            takes=_parts(output, output_sizes),
            addressed=True,
            own=gives[self._rank].address,
        )

    def broadcast(self, signature: bytes, buffer: Tensor, root: int) -> SlotPlan:
        """Fill ``buffer`` with the root's."""
        if root == self._rank:
            return self._move(signature, self._nobody, buffer.nbytes, gives=(Span.of(buffer),))
        takes = self._only(root, buffer)
        return self._move(signature, self._only_rank[root], buffer.nbytes, takes=takes)

    def reduce(
        self, signature: bytes, output: Tensor, source: Tensor, root: int, op: ReduceOp
    ) -> SlotPlan:
        """Reduce into the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._nobody, source.nbytes, gives=(Span.of(source),))
        return self._reduce(signature, output, source, op, ())

    def gather(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Put all ``source`` in a row in the root's ``output``."""
        if root != self._rank:
            return self._move(signature, self._nobody, source.nbytes, gives=(Span.of(source),))
        sizes = (source.numel(),) * self._n
        return self._gather(signature, output, source, sizes, ())

    def scatter(self, signature: bytes, output: Tensor, source: Tensor, root: int) -> SlotPlan:
        """Fill ``output`` with this rank's part of the root's ``source``."""
        takes = self._only(root, output)
        if root != self._rank:
            awaits = self._only_rank[root]
            return self._move(signature, awaits, output.nbytes, takes=takes, addressed=True)
        gives = _parts(source, (output.numel(),) * self._n)
        return self._move(
            signature,
            self._nobody,
            output.nbytes,
            gives=gives,
            takes=takes,
            addressed=True,
            own=gives[root].address,
        )

    def table(self, signature: bytes, mine: Span, table: Span) -> SlotPlan:
        """Put the tables of all ranks, of one size, in a row."""
        takes = tuple(Span(table.address + r * mine.size, mine.size) for r in range(self._n))
        return self._move(
            signature, self._everyone, mine.size, gives=(mine,), takes=takes, own=mine.address
        )

    def _move(
        self,
        signature: bytes,
        awaits: bytes,
        length: int,
        *,
        gives: tuple[Span, ...] = (),
        takes: tuple[Span, ...] = (),
        addressed: bool = False,
        own: int = 0,
    ) -> SlotPlan:
        return SlotPlan(MOVE, signature, awaits, 0, NO_OP, length, gives, takes, addressed, own)

    def _gather(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        sizes: Sequence[int],
        gives: tuple[Span, ...],
    ) -> SlotPlan:
        return self._move(
            signature,
            self._everyone,
            max(sizes) * source.itemsize,
            gives=gives,
            takes=_parts(output, sizes),
            own=source.data_ptr(),
        )

    def _reduce(
        self,
        signature: bytes,
        output: Tensor,
        source: Tensor,
        op: ReduceOp,
        gives: tuple[Span, ...],
        *,
        kind: int = REDUCE,
        length: int | None = None,
        addressed: bool = False,
        own: int | None = None,
    ) -> SlotPlan:
        return SlotPlan(
            kind,
            signature,
            self._everyone,
            DTYPE_CODES[source.dtype],
            op,
            source.nbytes if length is None else length,
            gives,
            (Span.of(output),),
            addressed,
            source.data_ptr() if own is None else own,
        )

    def _only(self, root: int, buffer: Tensor) -> tuple[Span, ...]:
        return (*(NOTHING,) * root, Span.of(buffer), *(NOTHING,) * (self._n - root - 1))


def _parts(tensor: Tensor, sizes: Sequence[int]) -> tuple[Span, ...]:
    """The parts of a tensor, one after the other."""
    address, itemsize = tensor.data_ptr(), tensor.itemsize
    spans = []
    for size in sizes:
        spans.append(Span(address, size * itemsize))
        address += size * itemsize
    return tuple(spans)
