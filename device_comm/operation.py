"""Describe an operation as an object: what one rank asks a backend to do, and how numbers are
reduced.

`reduce_in_rank_order` defines the result: it begins with rank 0's value and takes the others in
rank order; half precision is accumulated in float32. Whatever reduces in Python calls it.

The source is this rank's input, the output its result. N is the number of ranks:

    verb             source                           output
    ---------------  -------------------------------  --------------------------------
    all_reduce       a tensor, alike on all ranks     their reduction
    all_gather       this rank's part                 the N parts, in rank order
    all_gatherv      ``output_sizes[rank]`` elements  the N parts, of ``output_sizes``
    reduce_scatter   N equal parts                    the reduction of part ``rank``
    reduce_scatterv  N parts, of ``source_sizes``     the reduction of part ``rank``
    all_to_all       N parts, of ``source_sizes``     part ``rank`` of every rank
    broadcast        on ``peer``: the tensor          on the others: the tensor
    reduce           a tensor, alike on all ranks     on ``peer``: their reduction
    gather           this rank's part                 on ``peer``: the N parts
    scatter          on ``peer``: N equal parts       part ``rank``
    send             the tensor, to ``peer``
    recv                                              the tensor, from ``peer``; or a series
    barrier

Where an entry does not apply, the tensor is `NO_TENSOR`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from shm_broadcast.executor import Ended


class ReduceOp(IntEnum):
    """The reductions, numbered as in Bagua; torch is told their names, never their numbers.

    On bool tensors SUM and MAX are "any", PRODUCT and MIN are "all". AVG is for floating
    point and complex tensors: an average of integers that rounds is not offered.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10

    @property
    def torch(self) -> dist.ReduceOp:
        """The operation of the same name in ``torch.distributed``."""
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


def check_reduction(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise `TypeError` unless ``op`` is a `ReduceOp` that is defined for ``dtype``."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a coordinator.ReduceOp, not {op!r}")
    objection = _objection(op, dtype)
    if objection:
        raise TypeError(objection)


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
    """Reduce ``parts``, one per rank, into ``output``.

    Args:
        parts: tensors of ``output``'s shape and dtype; they are not changed.
        op: a reduction that `check_reduction` accepts for their dtype.
        output: where the result goes; may be the first of ``parts``.
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
"""What a backend may be asked for."""

ALL_VERBS: Final = frozenset[Verb](get_args(Verb))

REDUCTIONS: Final = frozenset({"all_reduce", "reduce_scatter", "reduce_scatterv", "reduce"})
"""The verbs that reduce tensors of several ranks to one."""

ROOTED: Final = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
"""The verbs that have a root, and whether data come from it or go to it."""

CUT: Final = frozenset(
    {"all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "all_to_all"}
)
"""The verbs in which all ranks must cut or concatenate along the same dimension."""

NO_TENSOR: Final = torch.empty(0, device="cpu")
"""The source of a rank that has no input, or the output of one that gets no result."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What an all-reduce goes on with, if its backend `norms`: ``kept = residual + sum``, and
    ``output = rms_norm(kept) * weight``. All are contiguous, of the source's dtype.

    Attributes:
        residual: of the source's shape; the same on all ranks.
        weight: one row, the last dimension of the source; the same on all ranks.
        kept: of the source's shape.
        epsilon: what is added to the mean of a row's squares.
    """

    residual: Tensor
    weight: Tensor
    kept: Tensor
    epsilon: float


class Operation:
    """One rank's part in one operation of its group. It keeps its tensors alive.

    Attributes:
        verb: one of `ALL_VERBS`.
        source: this rank's input; contiguous.
        output: where this rank's result goes; contiguous. It shares no memory with ``source``,
            except that in an all_reduce or a reduce both may be the same memory (in place).
        op: the reduction; used by the verbs in `REDUCTIONS` only.
        peer: the root, or the other rank of a send or recv.
        source_sizes: the number of elements of each part of ``source``; None: parts are equal.
        output_sizes: the number of elements of each part of ``output``; None: parts are equal. An
            all_to_all has both or neither.
        background: whether the caller goes on without waiting (``async_op=True``).
        timeout: seconds, or a deadline; None: for ever.
        name: the communicator's name and the verb, for the board and errors.
        following: only for a background recv of a series of tensors, which has no ``output``:
            returns the contiguous tensors to fill next, when the ones before are filled; an empty
            sequence ends the series. Any thread may call it.
        ended: of an operation in the background: to be told of its end by a backend that knows of
            it before somebody waits.
        norm: what an all-reduce goes on with; None: its output is the sum.
        shape: of the callers' tensors, where all ranks must have the same one, or in a scatter of
            their parts: what backends compare. A -1 stands for rows of which each rank has its own
            number.
        dim: the dimension along which the callers' tensors are cut or concatenated, where all
            ranks must say the same one.
    """

    __slots__ = (
        "background",
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
        """Make an operation. Communicators set ``name``, and ``timeout`` if the caller gave none.

        The arguments that every verb has come first, to be passed by position: a keyword argument
        costs a tenth of a microsecond.
        """
        self.verb = verb
        self.source = source
        self.output = output
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
        """When to give up. Made at the first use: an operation that never waits reads no clock."""
        if not isinstance(self.timeout, Deadline):
            self.timeout = Deadline.after(self.timeout)
        return self.timeout

    @property
    def buffer(self) -> Tensor:
        """The source, or of a rank that gives nothing the output: the tensor of a broadcast."""
        return self.output if self.source is NO_TENSOR else self.source

    @property
    def moves_nothing(self) -> bool:
        """Whether the tensors are such that no rank has anything to move, if all call the same."""
        if self.source.numel() or self.output.numel():
            return False
        own_sizes = self.verb == "all_to_all" and self.source_sizes is not None
        return not own_sizes and self.verb != "barrier" and self.following is None

    def source_parts(self, world_size: int) -> Sequence[int]:
        """The number of elements of each part of ``source``."""
        return self.source_sizes or (self.source.numel() // world_size,) * world_size

    def output_parts(self, world_size: int) -> Sequence[int]:
        """The number of elements of each part of ``output``."""
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
        """A copy of this operation with other tensors; the deadline is the same.

        Without ``verb`` the verb and the sizes stay the same. With ``verb`` the sizes are those of
        the arguments.
        """
        same = verb is None
        return Operation(
            verb or self.verb,
            source,
            output,
            self.background,
            self.deadline,
            self.op,
            self.peer,
            self.source_sizes if same else source_sizes,
            self.output_sizes if same else output_sizes,
            self.name,
            self.following if same else None,
            self.ended if same else None,
            shape=self.shape if same else source.shape,
            dim=self.dim if same else 0,
        )

    def __repr__(self) -> str:
        return f"<Operation {self.name or self.verb}>"
