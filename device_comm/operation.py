"""Define operations as values, and the result of reductions.

A reduction combines the values in rank order, from rank 0 on, and accumulates half precision in
float32. All reductions in Python call `reduce_in_rank_order`.

The source is this rank's input, the output its result, with N ranks. Other tensors are `NO_TENSOR`:

    verb             source                           output
    ---------------  -------------------------------  --------------------------------
    all_reduce       a tensor, same on all ranks      their reduction
    all_gather       this rank's part                 the N parts, in rank order
    all_gatherv      ``output_sizes[rank]`` elements  the N parts, of ``output_sizes``
    reduce_scatter   N equal parts                    the reduction of part ``rank``
    reduce_scatterv  N parts, of ``source_sizes``     the reduction of part ``rank``
    all_to_all       N parts, of ``source_sizes``     part ``rank`` of every rank
    broadcast        on ``peer``: the tensor          on the others: the tensor
    reduce           a tensor, same on all ranks      on ``peer``: their reduction
    gather           this rank's part                 on ``peer``: the N parts
    scatter          on ``peer``: N equal parts       part ``rank``
    send             the tensor, to ``peer``
    recv                                              the tensor, from ``peer``; or a series
    barrier
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from shm_broadcast.executor import Ended


class ReduceOp(IntEnum):
    """The reductions, numbered as in Bagua; torch uses other numbers.

    On bool tensors SUM and MAX are "any", PRODUCT and MIN are "all". AVG is for floating point and
    complex tensors only.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10

    @classmethod
    def of(cls, op: AnyOp) -> Self:
        """Return ``op``, or the reduction with the name of torch's; raise TypeError without one."""
        if isinstance(op, cls):
            return op
        if isinstance(op, dist.ReduceOp.RedOpType) and op.name in cls.__members__:
            return cls[op.name]
        raise TypeError(f"op must be a coordinator.ReduceOp, not {op!r}")

    @property
    def torch(self) -> dist.ReduceOp:
        """Return the operation of the same name in ``torch.distributed``."""
        return dist.ReduceOp(getattr(dist.ReduceOp, self.name))


_BITWISE = frozenset({ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_ACCUMULATE_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_MOVED_ONLY = frozenset({torch.uint64, torch.complex32})
_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
}


AnyOp: TypeAlias = ReduceOp | dist.ReduceOp.RedOpType
"""A reduction of this library, or torch's of the same name."""


def check_reduction(op: AnyOp, dtype: torch.dtype) -> ReduceOp:
    """Return the `ReduceOp` for ``op``; raise TypeError unless it is defined for ``dtype``."""
    op = ReduceOp.of(op)
    objection = _objection(op, dtype)
    if objection:
        raise TypeError(objection)
    return op


@cache
def _objection(op: ReduceOp, dtype: torch.dtype) -> str:
    real_float = dtype.is_floating_point
    if (real_float and dtype.itemsize == 1) or dtype in _MOVED_ONLY:
        return f"{dtype} tensors are moved but not reduced; convert to a wider type"
    if op in _BITWISE and (real_float or dtype.is_complex):
        return f"{op.name} is for integer and bool tensors, not {dtype}"
    if op in _ORDERED and dtype.is_complex:
        return f"{op.name} is not defined for {dtype}: complex numbers have no order"
    if op is ReduceOp.AVG and not (real_float or dtype.is_complex):
        return f"AVG is for floating point and complex tensors, not {dtype}"
    return ""


def reduce_in_rank_order(parts: Sequence[Tensor], op: ReduceOp, output: Tensor) -> None:
    """Reduce ``parts``, one per rank, into ``output``, which may be the first of them.

    Shapes and dtypes are equal, and `check_reduction` accepts ``op`` for the dtype.
    """
    wide = _ACCUMULATE_IN.get(output.dtype, output.dtype)
    combine = _COMBINE[op]
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    if op is ReduceOp.AVG:
        total = total / len(parts)
    output.copy_(total)


Verb: TypeAlias = Literal[
    "all_reduce",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
"""The verbs that backends run."""

ALL_VERBS: Final = frozenset[Verb](get_args(Verb))

REDUCTIONS: Final = frozenset({"all_reduce", "reduce_scatter", "reduce_scatterv", "reduce"})
"""The verbs that reduce tensors of several ranks to one."""

ROOTED: Final = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
"""The verbs that have a root, and the direction of the data relative to it."""

CUT: Final = frozenset(
    {"all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "all_to_all"}
)
"""The verbs that split or concatenate along a dimension, which all ranks must agree on."""

NO_TENSOR: Final = torch.empty(0, device="cpu")
"""The source of a rank without input; the output of a rank without result."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norm that follows an all-reduce, if its backend `norms`.

    ``kept = residual + sum``, ``output = rms_norm(kept) * weight``; ``epsilon`` is added to the
    mean of a row's squares. All tensors are contiguous, of the source's dtype; ``residual`` and
    ``kept`` have its shape, ``weight`` is one row. ``residual`` and ``weight`` are the same on all
    ranks.
    """

    residual: Tensor
    weight: Tensor
    kept: Tensor
    epsilon: float


class Operation:
    """One rank's part in one operation of its group. It keeps its tensors alive.

    Attributes:
        source: the input; contiguous.
        buffer: the source, or the output if there is no source: the tensor of a broadcast.
        output: the result; contiguous. It shares no memory with ``source``, except that both may be
            equal in an all_reduce or a reduce (in place).
        op: the reduction; for the verbs in `REDUCTIONS` only.
        peer: the root, or the other rank of a send or recv.
        source_sizes: elements of each part of ``source``; None: equal parts.
        output_sizes: elements of each part of ``output``; None: equal parts. An all_to_all has both
            or neither.
        background: the caller does not wait (``async_op=True``).
        timeout: seconds, or a deadline; None: unlimited.
        name: the communicator's name and the verb, for the board and errors.
        following: of a background recv of a series, which has no ``output``: returns the next
            contiguous tensors to fill, after the previous ones are filled; an empty sequence ends
            the series. Any thread may call it.
        ended: of a background operation: a backend that detects the end before a wait calls it.
        norm: None: the output of an all-reduce is the sum.
        shape: of the callers' tensors (in a scatter: of their parts) if it must be the same on all
            ranks; for comparison. -1: rows that differ between ranks.
        dim: the dimension of `CUT` verbs, for comparison.
    """

    __slots__ = (
        "background",
        "buffer",
        "dim",
        "ended",
        "following",
        "name",
        "norm",
        "op",
        "output",
        "output_sizes",
        "peer",
        "shape",
        "source",
        "source_sizes",
        "timeout",
        "verb",
    )

    def __init__(
        self,
        # By position if every verb has it: a keyword argument costs a tenth of a microsecond.
        verb: Verb,
        source: Tensor = NO_TENSOR,
        output: Tensor = NO_TENSOR,
        background: bool = False,
        timeout: float | Deadline | None = None,
        op: ReduceOp = ReduceOp.SUM,
        peer: int = 0,
        source_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        name: str = "",
        following: Callable[[], Sequence[Tensor]] | None = None,
        ended: Ended | None = None,
        norm: Norm | None = None,
        shape: tuple[int, ...] = (),
        dim: int = 0,
    ) -> None:
        self.verb = verb
        self.source = source
        self.output = output
        self.buffer = output if source is NO_TENSOR else source
        self.op = op
        self.peer = peer
        self.source_sizes = source_sizes
        self.output_sizes = output_sizes
        self.background = background
        self.timeout = timeout
        self.name = name
        self.following = following
        self.ended = ended
        self.norm = norm
        self.shape = shape
        self.dim = dim

    @property
    def deadline(self) -> Deadline:
        """Return the deadline, made at first use: an operation that never waits reads no clock."""
        if not isinstance(self.timeout, Deadline):
            self.timeout = Deadline.after(self.timeout)
        return self.timeout

    @property
    def moves_nothing(self) -> bool:
        """Return True if no rank moves data, given that all call the same."""
        if self.source.numel() or self.output.numel():
            return False
        own_sizes = self.verb == "all_to_all" and self.source_sizes is not None
        return not own_sizes and self.verb != "barrier" and self.following is None

    def source_parts(self, world_size: int) -> Sequence[int]:
        """Return the number of elements of each part of ``source``."""
        return self.source_sizes or (self.source.numel() // world_size,) * world_size

    def output_parts(self, world_size: int) -> Sequence[int]:
        """Return the number of elements of each part of ``output``."""
        return self.output_sizes or (self.output.numel() // world_size,) * world_size

    def replace(
        self,
        source: Tensor,
        output: Tensor,
        *,
        verb: Verb | None = None,
        source_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> Operation:
        """Return a copy with other tensors and the same deadline.

        With ``verb`` the sizes are those of the arguments; without it they stay.
        """
        keeps_verb = verb is None
        return Operation(
            verb or self.verb,
            source,
            output,
            self.background,
            self.deadline,
            self.op,
            self.peer,
            self.source_sizes if keeps_verb else source_sizes,
            self.output_sizes if keeps_verb else output_sizes,
            self.name,
            self.following if keeps_verb else None,
            self.ended if keeps_verb else None,
            shape=self.shape if keeps_verb else source.shape,
            dim=self.dim if keeps_verb else 0,
        )

    def __repr__(self) -> str:
        return f"<Operation {self.name or self.verb}>"
