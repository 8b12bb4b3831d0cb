"""Collectives with a root: broadcast, reduce, gather, scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor

from device_comm.operation import NO_TENSOR, AnyOp, Operation, ReduceOp, check_reduction
from device_comm.verbs.checks import (
    Later,
    Now,
    Out,
    Timeout,
    check_dim,
    check_rank,
    check_tensor,
    equal_share,
    materialized,
    output_buffer,
    output_pieces,
    pack_pieces,
    resized,
    shares_memory,
)

if TYPE_CHECKING:
    from device_comm.verbs.runner import Runner
    from device_comm.work import Work


class RootedCollectives:
    """Collectives with a root. `device_comm.communicator` has the common rules."""

    runner: Runner

    @overload
    def broadcast(
        self, x: Tensor, src: int = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def broadcast(
        self, x: Tensor, src: int = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    def broadcast(
        self,
        x: Tensor,
        src: int = 0,
        *,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Return the ``x`` of rank ``src`` on all ranks. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; only ``src`` needs values.
            out: may be ``x`` itself.

        Returns:
            A tensor like ``x``, a new one on ``src`` as well; ``x`` itself in a group of one.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("broadcast", timeout, async_op, x, src, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        src = check_rank("src", src, run.world_size)
        if run.world_size == 1:
            return run.identity("broadcast", x, out, async_op)
        buffer, finish = output_buffer(run.new, out, x.shape, x, None if out is x else x)
        source, output = NO_TENSOR, buffer
        if run.rank == src:
            source, output = buffer, NO_TENSOR
            if not shares_memory(buffer, x):
                buffer.copy_(x.detach())
        operation = Operation(
            "broadcast", source, output, async_op, timeout, peer=src, shape=x.shape
        )
        return run.run(operation, buffer, finish)

    @overload
    def broadcast_(self, x: Tensor, src: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def broadcast_(self, x: Tensor, src: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    def broadcast_(
        self: Any, x: Tensor, src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Broadcast in place into ``x``, and return it. Collective: yes, every member."""
        return self.broadcast(x, src, out=x, async_op=async_op, timeout=timeout)

    @overload
    def reduce(
        self, x: Tensor, dst: int = ..., *, op: AnyOp = ..., out: Out = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def reduce(
        self, x: Tensor, dst: int = ..., *, op: AnyOp = ..., out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        *,
        op: AnyOp = ReduceOp.SUM,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, for rank ``dst``. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; unchanged.
            op: a reduction that `check_reduction` accepts for the dtype.
            out: on ``dst`` only; may be ``x`` itself.

        Returns:
            On ``dst`` a tensor like ``x``, or ``x`` itself in a group of one; elsewhere None.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("reduce", timeout, async_op, x, dst, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        op = check_reduction(op, x.dtype)
        dst = run.check_dst(dst, out)
        if run.world_size == 1:
            return run.identity("reduce", x, out, async_op)
        source = materialized(x)
        buffer, finish = None, None
        if run.rank == dst:
            buffer, finish = output_buffer(run.new, out, x.shape, source, None if out is x else x)
        output = NO_TENSOR if buffer is None else buffer
        operation = Operation(
            "reduce", source, output, async_op, timeout, op=op, peer=dst, shape=x.shape
        )
        return run.run(operation, buffer, finish)

    @overload
    def reduce_(
        self, x: Tensor, dst: int = ..., *, op: AnyOp = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def reduce_(
        self, x: Tensor, dst: int = ..., *, op: AnyOp = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    def reduce_(
        self: Any,
        x: Tensor,
        dst: int = 0,
        *,
        op: AnyOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce in place into the ``x`` of ``dst`` only. Collective: yes, every member.

        Returns ``x`` on ``dst``, None elsewhere.
        """
        out = x if self.runner.rank == dst else None
        return self.reduce(x, dst, op=op, out=out, async_op=async_op, timeout=timeout)

    @overload
    def gather(
        self, x: Tensor, dst: int = ..., dim: int = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def gather(
        self, x: Tensor, dst: int = ..., dim: int = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = -1,
        *,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, for rank ``dst``. Collective: yes, every member.

        Args:
            x: (..., s, ...), the same shape and dtype on all ranks; s is dimension ``dim``.
            out: on ``dst`` only.

        Returns:
            On ``dst`` (..., N * s, ...), or ``x`` itself in a group of one; elsewhere None.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("gather", timeout, async_op, x, dst, dim, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        dst = run.check_dst(dst, out)
        shape = resized(x.shape, dim, n * x.shape[dim])
        if n == 1:
            return run.identity("gather", x, out, async_op)
        source = materialized(x)
        buffer, finish = None, None
        if run.rank == dst:
            buffer, finish = output_pieces(run.new, out, shape, dim, n, source, x)
        output = NO_TENSOR if buffer is None else buffer
        operation = Operation("gather", source, output, async_op, timeout, peer=dst, shape=x.shape)
        return run.run(operation, buffer, finish)

    @overload
    def gather_(
        self, x: Tensor, dst: int = ..., dim: int = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def gather_(
        self, x: Tensor, dst: int = ..., dim: int = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    def gather_(
        self: Any,
        x: Tensor,
        dst: int = 0,
        dim: int = -1,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Gather into the ``x`` of ``dst``. Collective: yes, every member.

        On ``dst``, ``x`` is (..., N * s, ...) with its own input in part ``dst``; elsewhere (...,
        s, ...).

        Returns ``x`` on ``dst``, None elsewhere.
        """
        run = self.runner
        dst = check_rank("dst", dst, run.world_size)
        if run.rank != dst:
            return self.gather(x, dst, dim, async_op=async_op, timeout=timeout)
        own = run.copy_of_part(x, dim, dst)
        return self.gather(own, dst, dim, out=x, async_op=async_op, timeout=timeout)

    @overload
    def scatter(
        self,
        x: Tensor | None,
        src: int = ...,
        dim: int = ...,
        *,
        out: Out = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def scatter(
        self,
        x: Tensor | None,
        src: int = ...,
        dim: int = ...,
        *,
        out: Out = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = -1,
        *,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send part r of the ``x`` of rank ``src`` to rank r. Collective: yes, every member.

        Args:
            x: on ``src`` (..., N * s, ...), with N * s in dimension ``dim``; elsewhere None.
            out: (..., s, ...); required except on ``src``, for its shape.

        Returns:
            (..., s, ...), contiguous unless ``out`` is not; ``x`` itself in a group of one.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("scatter", timeout, async_op, x, src, dim, out)
            if done is not NotImplemented:
                return done
        src = check_rank("src", src, run.world_size)
        if run.rank == src:
            return self._scatter_own(x, src, dim, out, async_op, timeout)
        if x is not None:
            raise ValueError(f"x is given on rank {src} only; this is rank {run.rank}")
        if out is None:
            raise ValueError(f"rank {run.rank} needs out=, which has the shape of its part")
        check_tensor("out", out, run.device)
        check_dim(dim, out)
        buffer, finish = output_buffer(run.new, out, out.shape, out, None)
        operation = Operation(
            "scatter", NO_TENSOR, buffer, async_op, timeout, peer=src, shape=out.shape
        )
        return run.run(operation, buffer, finish)

    @overload
    def scatter_(self, x: Tensor, src: int = ..., dim: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def scatter_(
        self, x: Tensor, src: int = ..., dim: int = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    def scatter_(
        self: Any,
        x: Tensor,
        src: int = 0,
        dim: int = -1,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Scatter the ``x`` of ``src`` into each ``x``. Collective: yes, every member.

        On ``src``, ``x`` is (..., N * s, ...), and its first part becomes its own result; elsewhere
        (..., s, ...).

        Returns:
            (..., s, ...): on ``src`` a view of ``x``, elsewhere and in a group of one ``x``.
        """
        run = self.runner
        src = check_rank("src", src, run.world_size)
        if run.rank != src:
            return self.scatter(None, src, dim, out=x, async_op=async_op, timeout=timeout)
        out = run.part(x, dim, 0)
        return self.scatter(x, src, dim, out=out, async_op=async_op, timeout=timeout)

    def _scatter_own(
        self, x: Tensor | None, src: int, dim: int, out: Out, async_op: bool, timeout: Timeout
    ) -> Any:
        run = self.runner
        if x is None:
            raise ValueError(f"rank {src} is the source: it needs x")
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        shape = resized(x.shape, dim, equal_share(x.shape[dim], n, dim))
        if n == 1:
            return run.identity("scatter", x, out, async_op)
        source = pack_pieces(x, dim, n)
        buffer, finish = output_buffer(run.new, out, shape, source, x)
        operation = Operation("scatter", source, buffer, async_op, timeout, peer=src, shape=shape)
        return run.run(operation, buffer, finish)
