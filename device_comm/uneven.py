"""The verbs in which the ranks' shares have different sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from device_comm.arrange import landing_pieces, pieces_first, resized
from device_comm.backend import Backend
from device_comm.checks import (
    check_dim,
    check_out,
    check_sizes,
    check_tensor,
    check_total,
    equal_share,
)
from device_comm.reduce_op import ReduceOp, check_reduction
from device_comm.work import join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.primitives import Call
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline


class UnevenVerbs(Backend):
    """Collectives with sizes per rank. See `device_comm.base` for what all verbs share."""

    def all_gatherv(
        self,
        x: Tensor | Sequence[Tensor],
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, of different sizes. Collective: yes, every member.

        Args:
            x: ``sizes[rank]`` rows along ``dim``; or a list of such tensors, each gathered.
            dim: along which to concatenate.
            sizes: rows of each rank, the same list on all ranks; None: all have as many.
            out: ``sum(sizes)`` rows; for a list, a list.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            ``sum(sizes)`` rows, contiguous; for a list, a list. ``x`` in a group of one.
        """
        inputs: Sequence[Tensor] = [x] if isinstance(x, Tensor) else x
        outputs = _match_outputs(inputs, [out] if isinstance(x, Tensor) else out)
        plans = [
            self._plan_gatherv(*pair, dim, sizes) for pair in zip(inputs, outputs, strict=True)
        ]
        if self.world_size == 1:
            same = [
                given if wanted is None else wanted.copy_(given)
                for given, wanted in zip(inputs, outputs, strict=True)
            ]
            return self._skip("all_gatherv", same[0] if isinstance(x, Tensor) else same, async_op)

        def primitive(call: Call) -> Pending | None:
            return join(
                [
                    self._all_gatherv(buffer, source, elements, call)
                    for source, buffer, _, elements in plans
                    if buffer.numel()
                ]
            )

        def finish() -> Tensor | list[Tensor]:
            done = [buffer if last is None else last() for _, buffer, last, _ in plans]
            return done[0] if isinstance(x, Tensor) else done

        return self._run(
            "all_gatherv",
            primitive,
            None,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=plans,
        )

    def reduce_scatterv(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """As `reduce_scatter`, with parts of different sizes. Collective: yes, every member.

        Args:
            x: ``sum(sizes)`` rows along ``dim``, the same shape and dtype on all ranks.
            dim: along which rank r gets ``sizes[r]`` rows.
            sizes: rows of each rank, the same list on all ranks; None: equal parts.
            op: what `check_reduction` accepts for the dtype.
            out: ``sizes[rank]`` rows.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            ``sizes[rank]`` rows, contiguous; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        check_reduction(op, x.dtype)
        dim = check_dim(dim, x)
        n = self.world_size
        rows = x.shape[dim]
        parts = (
            (equal_share(rows, n, dim),) * n if sizes is None else check_sizes("sizes", sizes, n)
        )
        check_total("sizes", parts, rows, dim)
        mine = parts[self.rank]
        shape = resized(x.shape, dim, mine)
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("reduce_scatterv", x, out, async_op)
        source = pieces_first(x, dim, rows)
        buffer, finish = landing_pieces(self._empty, out, shape, dim, mine, source, x)
        if x.numel() == 0:
            return self._skip("reduce_scatterv", buffer if finish is None else finish(), async_op)
        elements = _elements(parts, _row(shape, dim))
        return self._run(
            "reduce_scatterv",
            lambda call: self._reduce_scatterv(buffer, source, elements, op, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def all_to_all(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Send part r of ``x`` to rank r; concatenate what comes. Collective: yes, every member.

        Args:
            x: the same shape on all ranks but for the rows along ``dim``.
            dim: along which ``x`` is cut and the parts are concatenated.
            input_sizes: rows that go to each rank; None: equal parts. All ranks give sizes, or
                none does.
            output_sizes: rows that come from each rank: rank r's ``input_sizes`` for this
                rank. Given together with ``input_sizes``, or not at all.
            out: ``sum(output_sizes)`` rows.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            ``sum(output_sizes)`` rows, contiguous; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        n = self.world_size
        rows = x.shape[dim]
        if (input_sizes is None) != (output_sizes is None):
            raise ValueError("input_sizes and output_sizes are given together, or not at all")
        if input_sizes is None:
            gives = takes = (equal_share(rows, n, dim),) * n
        else:
            gives = check_sizes("input_sizes", input_sizes, n)
            takes = check_sizes("output_sizes", output_sizes, n)
        check_total("input_sizes", gives, rows, dim)
        if gives[self.rank] != takes[self.rank]:
            raise ValueError(
                f"input_sizes and output_sizes differ about what rank {self.rank} sends itself: "
                f"{gives[self.rank]} and {takes[self.rank]}"
            )
        total = sum(takes)
        shape = resized(x.shape, dim, total)
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("all_to_all", x, out, async_op)
        source = pieces_first(x, dim, rows)
        buffer, finish = landing_pieces(self._empty, out, shape, dim, total, source, x)
        if input_sizes is None and x.numel() == 0:
            return self._skip("all_to_all", buffer if finish is None else finish(), async_op)
        row = _row(shape, dim)
        taken, given = _elements(takes, row), _elements(gives, row)

        def primitive(call: Call) -> Pending | None:
            if input_sizes is None:
                return self._all_to_all_equal(buffer, source, given, call)
            return self._all_to_all(buffer, source, taken, given, call)

        return self._run(
            "all_to_all",
            primitive,
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def _plan_gatherv(
        self, x: Tensor, out: Tensor | None, dim: int, sizes: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Any, tuple[int, ...]]:
        """Validate one tensor of `all_gatherv`; its source, buffer, last step and elements."""
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        n = self.world_size
        rows = x.shape[dim]
        parts = (rows,) * n if sizes is None else check_sizes("sizes", sizes, n)
        if parts[self.rank] != rows:
            raise ValueError(
                f"sizes[{self.rank}] is {parts[self.rank]}; dimension {dim} has {rows} rows here"
            )
        total = sum(parts)
        shape = resized(x.shape, dim, total)
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        source = pieces_first(x, dim, rows)
        buffer, finish = landing_pieces(self._empty, out, shape, dim, total, source, x)
        return source, buffer, finish, _elements(parts, _row(shape, dim))


def _match_outputs(
    inputs: Sequence[Tensor], outputs: Sequence[object] | Tensor | None
) -> list[Tensor | None]:
    if outputs is None:
        return [None] * len(inputs)
    if isinstance(outputs, Tensor) or len(outputs) != len(inputs):
        raise TypeError(f"out must be a sequence of {len(inputs)} tensors, as x is")
    given: list[Tensor | None] = []
    for output in outputs:
        if output is not None and not isinstance(output, Tensor):
            raise TypeError(f"out must be of tensors, not {type(output).__name__}")
        given.append(output)
    return given


def _row(shape: Sequence[int], dim: int) -> int:
    """Elements of one row along ``dim``."""
    return math.prod(resized(shape, dim, 1))


def _elements(rows: Sequence[int], row: int) -> tuple[int, ...]:
    return tuple(count * row for count in rows)
