"""The verbs with parts of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor

from device_comm.operation import Operation, ReduceOp, check_reduction
from device_comm.verbs.checks import (
    Later,
    Maybe,
    Now,
    Out,
    Sizes,
    Timeout,
    check_dim,
    check_out,
    check_sizes,
    check_tensor,
    check_total,
    elements_of,
    equal_share,
    output_pieces,
    pack_pieces,
    resized,
    row_elements,
    shares_memory,
)

if TYPE_CHECKING:
    from device_comm.verbs.runner import Runner
    from device_comm.work import Work


class UnevenVerbs:
    """Collectives with sizes per rank. `device_comm.communicator` has the common rules."""

    runner: Runner

    @overload
    def all_gatherv(
        self, x: Tensor, dim: int = ..., sizes: Sizes = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def all_gatherv(
        self, x: Tensor, dim: int = ..., sizes: Sizes = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def all_gatherv(
        self, x: Tensor, dim: int = ..., sizes: Sizes = ..., *, out: Out = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    @overload
    def all_gatherv(
        self,
        x: Sequence[Tensor],
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        out: Sequence[Tensor] | None = ...,
        **how: Unpack[Now],
    ) -> list[Tensor]: ...
    @overload
    def all_gatherv(
        self,
        x: Sequence[Tensor],
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        out: Sequence[Tensor] | None = ...,
        **how: Unpack[Later],
    ) -> Work[list[Tensor]]: ...
    @overload
    def all_gatherv(
        self,
        x: Sequence[Tensor],
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        out: Sequence[Tensor] | None = ...,
        **how: Unpack[Maybe],
    ) -> list[Tensor] | Work[list[Tensor]]: ...
    def all_gatherv(
        self,
        x: Tensor | Sequence[Tensor],
        dim: int = 0,
        sizes: Sizes = None,
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, of different sizes. Collective: yes, every member.

        Args:
            x: ``sizes[rank]`` rows along ``dim``; or a list of such tensors, each gathered.
            sizes: rows of each rank, the same on all ranks; None: equal on all.

        Returns:
            ``sum(sizes)`` rows, as ``out`` has, contiguous; for a list, a list. In a group of one,
                the tensors of ``x`` themselves.
        """
        run = self.runner
        inputs: Sequence[Tensor] = [x] if isinstance(x, Tensor) else x
        outputs = _match_outputs(inputs, [out] if isinstance(x, Tensor) else out)
        rows = [self._check_gatherv(each, dim, sizes) for each in inputs]
        if run.world_size == 1:
            for given, target in zip(inputs, outputs, strict=True):
                if target is not None:
                    check_out(target, given.shape, given.dtype, run.device)
            # An output may share memory with a later input.
            read = [y.clone() for y in inputs] if len(inputs) > 1 and out is not None else inputs
            for given, target in zip(read, outputs, strict=True):
                if target is not None and target is not given:
                    target.detach().copy_(given)
            results = [
                given if target is None else target
                for given, target in zip(inputs, outputs, strict=True)
            ]
            return run.skip(
                "all_gatherv", results[0] if isinstance(x, Tensor) else results, async_op
            )
        plans = [
            self._plan_gatherv(given, target, dim, parts, inputs, async_op, timeout)
            for given, target, parts in zip(inputs, outputs, rows, strict=True)
        ]

        def finish() -> Tensor | list[Tensor]:
            done = [operation.output if last is None else last() for operation, last in plans]
            return done[0] if isinstance(x, Tensor) else done

        operations = [operation for operation, _ in plans]
        if not operations:
            return run.skip("all_gatherv", finish(), async_op)
        return run.run(operations[0], None, finish, operations[1:])

    @overload
    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = ...,
        sizes: Sizes = ...,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = -1,
        sizes: Sizes = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce as `reduce_scatter`, with parts of ``sizes`` rows. Collective: yes, every member.

        Args:
            x: ``sum(sizes)`` rows along ``dim``, the same shape and dtype on all ranks.
            sizes: rows of each rank, the same on all ranks; None: equal parts.
            op: a reduction that `check_reduction` accepts for the dtype.

        Returns:
            ``sizes[rank]`` rows, as ``out`` has, contiguous; ``x`` itself in a group of one.
        """
        run = self.runner
        check_tensor("x", x, run.device)
        check_reduction(op, x.dtype)
        dim = check_dim(dim, x)
        n = run.world_size
        rows = x.shape[dim]
        parts = (
            (equal_share(rows, n, dim),) * n if sizes is None else check_sizes("sizes", sizes, n)
        )
        check_total("sizes", parts, rows, dim)
        own_rows = parts[run.rank]
        shape = resized(x.shape, dim, own_rows)
        if n == 1:
            return run.identity("reduce_scatterv", x, out, async_op)
        source = pack_pieces(x, dim, rows)
        buffer, finish = output_pieces(run.new, out, shape, dim, own_rows, source, x)
        operation = Operation(
            "reduce_scatterv",
            source,
            buffer,
            async_op,
            timeout,
            op=op,
            source_sizes=elements_of(parts, row_elements(shape, dim)),
            shape=resized(shape, dim, -1),
            dim=dim,
        )
        return run.run(operation, buffer, finish)

    def _check_gatherv(self, x: Tensor, dim: int, sizes: Sizes) -> tuple[int, ...]:
        """Check one input of `all_gatherv`; return the rows of each rank."""
        run = self.runner
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        rows = x.shape[dim]
        parts = (rows,) * n if sizes is None else check_sizes("sizes", sizes, n)
        if parts[run.rank] != rows:
            raise ValueError(
                f"sizes[{run.rank}] is {parts[run.rank]}; dimension {dim} of x has {rows} rows"
            )
        return parts

    def _plan_gatherv(
        self,
        x: Tensor,
        out: Out,
        dim: int,
        parts: tuple[int, ...],
        inputs: Sequence[Tensor],
        async_op: bool,
        timeout: Timeout,
    ) -> tuple[Operation, Callable[[], Tensor] | None]:
        """Return one tensor's operation and its last step; all ``inputs`` are read first."""
        dim, total = check_dim(dim, x), sum(parts)
        shape = resized(x.shape, dim, total)
        source = pack_pieces(x, dim, x.shape[dim])
        read = next((y for y in inputs if out is not None and shares_memory(out, y)), x)
        buffer, finish = output_pieces(self.runner.new, out, shape, dim, total, source, read)
        operation = Operation(
            "all_gatherv",
            source,
            buffer,
            async_op,
            timeout,
            output_sizes=elements_of(parts, row_elements(shape, dim)),
            shape=resized(shape, dim, -1),
            dim=dim,
        )
        return operation, finish


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
