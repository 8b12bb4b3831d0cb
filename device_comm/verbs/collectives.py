"""Collectives without a root: of equal shares, or of sizes per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import rms_norm

from device_comm.operation import AnyOp, Norm, Operation, ReduceOp, check_reduction
from device_comm.verbs.checks import (
    Later,
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
    materialized,
    output_buffer,
    output_pieces,
    pack_pieces,
    resized,
    row_elements,
    shares_memory,
)

if TYPE_CHECKING:
    from device_comm.verbs.runner import Runner, Traced
    from device_comm.work import Work


SUM: Final = ReduceOp.SUM


class Collectives:
    """Collectives without a root. `device_comm.communicator` has the common rules."""

    runner: Runner
    _traced: Traced | None = None

    @overload
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: AnyOp = ...,
        out: Out = ...,
        hierarchical: bool = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: AnyOp = ...,
        out: Out = ...,
        hierarchical: bool = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: AnyOp = SUM,
        out: Out = None,
        hierarchical: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks. Collective: yes, every member.

        No verb propagates gradients; `coordinator.layout.moves` does, for training.

        Args:
            x: the same shape and dtype on all ranks.
            op: a reduction that `check_reduction` accepts for the dtype.
            out: may be ``x`` itself.
            hierarchical: reduce within each node first, then between nodes, if the nodes are known
                (a communicator has none); complete on return, also with ``async_op``.

        Returns:
            A tensor like ``x``; ``x`` itself in a group of one.
        """
        if hierarchical:
            return self._reduce_by_nodes(x, op=op, out=out, async_op=async_op, timeout=timeout)
        traced = self._traced
        if traced and is_compiling() and not async_op and timeout is None:
            if out is None:
                return traced.all_reduce(x, op)
            if out is x:
                if (total := traced.all_reduce(x, op)) is not x:
                    x.detach().copy_(total)  # hidden from autograd, as in eager mode
                return x
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("all_reduce", timeout, async_op, x, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        op = check_reduction(op, x.dtype)
        if run.world_size == 1:
            return run.identity("all_reduce", x, out, async_op)
        source = materialized(x)
        buffer, finish = output_buffer(run.new, out, x.shape, source, None if out is x else x)
        operation = Operation("all_reduce", source, buffer, async_op, timeout, op=op, shape=x.shape)
        return run.run(operation, buffer, finish)

    @overload
    def all_reduce_(self, x: Tensor, *, op: AnyOp = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_reduce_(self, x: Tensor, *, op: AnyOp = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    def all_reduce_(
        self: Any,
        x: Tensor,
        *,
        op: AnyOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce in place into ``x``, and return it. Collective: yes, every member."""
        return self.all_reduce(x, op=op, out=x, async_op=async_op, timeout=timeout)

    def all_reduce_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float = 1e-6,
        *,
        timeout: Timeout = None,
    ) -> tuple[Tensor, Tensor]:
        """Sum ``x`` over all ranks, add the residual, and norm the rows (RMSNorm).

        Runs as one kernel for small ``x`` on GPUs of one host, else in steps. Results are equal up
        to rounding: the kernel rounds the new residual once. They are the same on all ranks if
        ``residual`` and ``weight`` are.

        Under `torch.compile` it is one op of the graph if the group has a kernel for the dtype; the
        size decides in each call. Otherwise tracing decomposes it, so that the compiler fuses the
        steps. `coordinator.all_reduce_norm_pass` matches models that write the steps out.

        Collective: yes, every member.

        Args:
            x, residual: (..., h) of floats; ``x`` has the same shape and dtype on all ranks.
            weight: (h,), of the dtype of ``x``.
            epsilon: added to the mean of a row's squares.

        Returns:
            ``(rms_norm(kept) * weight, kept)``, with ``kept = residual + sum``; new tensors.
        """
        run = self.runner
        if not is_compiling():
            check_tensor("x", x, run.device)
            if not x.dtype.is_floating_point or x.dim() == 0:
                raise TypeError(f"x must be rows of floats, not {x.dim()} dimensions of {x.dtype}")
            _check_like("residual", residual, x, x.shape)
            _check_like("weight", weight, x, x.shape[-1:])
        given = (x, residual, weight)
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            pass  # in steps
        elif is_compiling():
            traced = self._traced if timeout is None else None
            if traced is not None and x.dtype in run.backend.capabilities.normed:
                return traced.all_reduce_norm(x, residual, weight, epsilon)
        elif run.world_size > 1 and run.backend.norms(x, weight):
            # The layout may differ between ranks; the launched operation must not.
            x, residual, weight = map(materialized, given)
            output, kept = run.new(x.shape, x.dtype, x), run.new(x.shape, x.dtype, x)
            norm = Norm(residual, weight, kept, epsilon)
            run.run(
                Operation("all_reduce", x, output, timeout=timeout, norm=norm, shape=x.shape), None
            )
            return output, kept
        kept = residual + self.all_reduce(x, timeout=timeout)
        return rms_norm(kept, weight.shape, weight, epsilon), kept

    @overload
    def all_gather(
        self, x: Tensor, dim: int = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, x: Tensor, dim: int = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    def all_gather(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, in rank order. Collective: yes, every member.

        Args:
            x: (..., s, ...), the same shape and dtype on all ranks; s is dimension ``dim``.

        Returns:
            (..., N * s, ...), the shape of ``out``, contiguous; ``x`` itself in a group of one.
        """
        traced = self._traced
        if traced and is_compiling() and out is None and not async_op and timeout is None:
            return traced.all_gather(x, check_dim(dim, x))
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("all_gather", timeout, async_op, x, dim, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        shape = resized(x.shape, dim, n * x.shape[dim])
        if n == 1:
            return run.identity("all_gather", x, out, async_op)
        source = materialized(x)
        buffer, finish = output_pieces(run.new, out, shape, dim, n, source, x)
        operation = Operation(
            "all_gather", source, buffer, async_op, timeout, shape=x.shape, dim=dim
        )
        return run.run(operation, buffer, finish)

    @overload
    def all_gather_(self, x: Tensor, dim: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_gather_(self, x: Tensor, dim: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    def all_gather_(
        self: Any, x: Tensor, dim: int = -1, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Gather part ``rank`` of each ``x`` into ``x``. Collective: yes, every member.

        Returns:
            ``x``, (..., N * s, ...), filled; ``dim`` is the dimension of the parts.
        """
        own = self.runner.copy_of_part(x, dim, self.runner.rank)
        return self.all_gather(own, dim, out=x, async_op=async_op, timeout=timeout)

    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = ..., *, op: AnyOp = ..., out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = ..., *, op: AnyOp = ..., out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        op: AnyOp = SUM,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; rank r keeps part r. Collective: yes, every member.

        Args:
            x: (..., N * s, ...), the same shape and dtype on all ranks; N * s is dimension ``dim``.
            op: a reduction that `check_reduction` accepts for the dtype.

        Returns:
            (..., s, ...), the shape of ``out``, contiguous; ``x`` itself in a group of one.
        """
        traced = self._traced
        if traced and is_compiling() and out is None and not async_op and timeout is None:
            return traced.reduce_scatter(x, check_dim(dim, x), op)
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("reduce_scatter", timeout, async_op, x, dim, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        op = check_reduction(op, x.dtype)
        dim = check_dim(dim, x)
        n = run.world_size
        shape = resized(x.shape, dim, equal_share(x.shape[dim], n, dim))
        if n == 1:
            return run.identity("reduce_scatter", x, out, async_op)
        source = pack_pieces(x, dim, n)
        buffer, finish = output_buffer(run.new, out, shape, source, x)
        operation = Operation(
            "reduce_scatter", source, buffer, async_op, timeout, op=op, shape=x.shape, dim=dim
        )
        return run.run(operation, buffer, finish)

    @overload
    def reduce_scatter_(
        self, x: Tensor, dim: int = ..., *, op: AnyOp = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def reduce_scatter_(
        self, x: Tensor, dim: int = ..., *, op: AnyOp = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    def reduce_scatter_(
        self: Any,
        x: Tensor,
        dim: int = -1,
        *,
        op: AnyOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce and scatter into the first part of ``x``. Collective: yes, every member.

        Returns:
            The first part, a view (..., s, ...) of ``x``; the rest of ``x`` is unchanged. ``x``
                itself in a group of one.
        """
        out = self.runner.part(x, dim, 0)
        return self.reduce_scatter(x, dim, op=op, out=out, async_op=async_op, timeout=timeout)

    @overload
    def all_to_all(
        self,
        x: Tensor,
        dim: int = ...,
        *,
        input_sizes: Sizes = ...,
        output_sizes: Sizes = ...,
        out: Out = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        x: Tensor,
        dim: int = ...,
        *,
        input_sizes: Sizes = ...,
        output_sizes: Sizes = ...,
        out: Out = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    def all_to_all(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        input_sizes: Sizes = None,
        output_sizes: Sizes = None,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send part r of ``x`` to rank r; concatenate the received. Collective: yes, every member.

        Args:
            x: the same shape on all ranks, except for the rows along ``dim``.
            input_sizes: rows for each rank; None: equal parts. All ranks pass sizes, or none.
            output_sizes: rows from each rank: rank r's ``input_sizes`` for this rank. Required with
                ``input_sizes``.

        Returns:
            ``sum(output_sizes)`` rows, as ``out`` has, contiguous; ``x`` itself in a group of one.
        """
        run = self.runner
        plain = input_sizes is None and output_sizes is None
        if plain and (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("all_to_all", timeout, async_op, x, dim, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        rows = x.shape[dim]
        if (input_sizes is None) != (output_sizes is None):
            raise ValueError("input_sizes and output_sizes are given together, or not at all")
        shape: tuple[int, ...] = x.shape
        compared, sent, received = shape, None, None
        if input_sizes is None:
            equal_share(rows, n, dim)
        else:
            sent = check_sizes("input_sizes", input_sizes, n)
            received = check_sizes("output_sizes", output_sizes, n)
            check_total("input_sizes", sent, rows, dim)
            if sent[run.rank] != received[run.rank]:
                raise ValueError(
                    f"input_sizes and output_sizes differ for rank {run.rank}, which is this rank: "
                    f"{sent[run.rank]} and {received[run.rank]}"
                )
            row = row_elements(shape, dim)
            shape, compared = resized(shape, dim, sum(received)), resized(shape, dim, -1)
            sent, received = elements_of(sent, row), elements_of(received, row)
        if n == 1:
            return run.identity("all_to_all", x, out, async_op)
        source = pack_pieces(x, dim, rows)
        buffer, finish = output_pieces(run.new, out, shape, dim, shape[dim], source, x)
        operation = Operation(
            "all_to_all",
            source,
            buffer,
            async_op,
            timeout,
            source_sizes=sent,
            output_sizes=received,
            shape=compared,
            dim=dim,
        )
        return run.run(operation, buffer, finish)

    @overload
    def all_to_all_(self, x: Tensor, dim: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_to_all_(self, x: Tensor, dim: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    def all_to_all_(
        self: Any, x: Tensor, dim: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Exchange equal parts in place, and return ``x``. Collective: yes, every member."""
        return self.all_to_all(x, dim, out=x, async_op=async_op, timeout=timeout)

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
            pairs = zip(inputs, outputs, strict=True)
            results = [given if target is None else target for given, target in pairs]
            result = results[0] if isinstance(x, Tensor) else results
            return run.skip("all_gatherv", result, async_op)
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
        op: AnyOp = ...,
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
        op: AnyOp = ...,
        out: Out = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = -1,
        sizes: Sizes = None,
        *,
        op: AnyOp = ReduceOp.SUM,
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
        op = check_reduction(op, x.dtype)
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

    def _reduce_by_nodes(self, x: Tensor, **how: Any) -> Any:
        return self.all_reduce(x, **how)

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


def _match_outputs(inputs: Sequence[Tensor], outputs: Any) -> list[Out]:
    if outputs is None:
        return [None] * len(inputs)
    if isinstance(outputs, Tensor) or len(outputs) != len(inputs):
        raise TypeError(f"out must be a sequence of {len(inputs)} tensors, as x is")
    for output in outputs:
        if not isinstance(output, Tensor | None):
            raise TypeError(f"out must be of tensors, not {type(output).__name__}")
    return list(outputs)


def _check_like(label: str, given: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(label, given, x.device)
    if given.dtype != x.dtype:
        raise TypeError(f"{label} is {given.dtype}; x is {x.dtype}")
    if given.shape != shape:
        raise ValueError(f"{label} has shape {tuple(given.shape)}, not {tuple(shape)}")
