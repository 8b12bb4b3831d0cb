"""The verbs of equal shares in which every rank gives and every rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from torch.compiler import is_compiling

from device_comm.operation import Operation
from device_comm.reduce_op import ReduceOp, check_reduction
from device_comm.verbs.arrange import landing, landing_pieces, pieces_first, plain, resized
from device_comm.verbs.checks import check_dim, check_tensor, equal_share
from device_comm.verbs.reduce_norm import reduce_and_norm

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.verbs.arguments import Later, Maybe, Now, Out, Timeout
    from device_comm.verbs.runner import Runner, Traced
    from device_comm.work import Work


class SymmetricVerbs:
    """Collectives without a root. See `device_comm.communicator` for what all verbs share."""

    runner: Runner
    _traced: Traced | None = None

    @overload
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        hierarchical: bool = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        hierarchical: bool = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ...,
        out: Out = ...,
        hierarchical: bool = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Out = None,
        hierarchical: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks. Collective: yes, every member.

        No gradient flows through this verb or any other: `coordinator.layout.differentiable` has
        those for training.

        Args:
            x: the same shape and dtype on all ranks.
            op: what `check_reduction` accepts for the dtype.
            out: like ``x``; may be ``x`` itself.
            hierarchical: within each node first, then between them, where the nodes are known (a
                communicator knows of none); it is done when this returns, also as a `Work`.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            A tensor like ``x``; ``x`` itself in a group of one.
        """
        if hierarchical:
            return self._reduce_by_nodes(x, op, out, async_op, timeout)
        traced = self._traced
        if traced and is_compiling() and not async_op and timeout is None:
            if out is None:
                return traced.all_reduce(x, op)
            if out is x:
                if (total := traced.all_reduce(x, op)) is not x:
                    x.detach().copy_(total)  # as outside a graph, autograd does not see it
                return x
        run = self.runner
        if not async_op and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("all_reduce", timeout, x, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        check_reduction(op, x.dtype)
        if run.world_size == 1:
            return run.identity("all_reduce", x, out, async_op)
        source = plain(x)
        buffer, finish = landing(run.new, out, x.shape, source, None if out is x else x)
        operation = Operation("all_reduce", source, buffer, async_op, timeout, op=op, shape=x.shape)
        return run.run(operation, buffer, finish)

    @overload
    def all_reduce_(self, x: Tensor, *, op: ReduceOp = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_reduce_(
        self, x: Tensor, *, op: ReduceOp = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce_(
        self, x: Tensor, *, op: ReduceOp = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def all_reduce_(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """`all_reduce` into ``x``. Collective: yes, every member. Returns ``x``."""
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
        """Sum ``x`` over all ranks, add it to the residual, and norm the rows (RMSNorm).

        One kernel where ``x`` is small enough and on GPUs of one host, elsewhere in steps, with
        the same result up to rounding: in one kernel the new residual is rounded once. The same
        on all ranks, if ``residual`` and ``weight`` are.

        Under `torch.compile` it is one op of the graph if the group has such a kernel for the
        dtype, and its size decides in each call; else it is taken apart when it is traced, so that
        the compiler fuses what follows the sum. `coordinator.all_reduce_norm_pass` finds it in
        models that write it out.

        Collective: yes, every member.

        Args:
            x: (..., h) of floats, the same shape and dtype on all ranks.
            residual: as ``x``.
            weight: (h,), of the dtype of ``x``.
            epsilon: what is added to the mean of a row's squares.
            timeout: seconds; None: what the group allows.

        Returns:
            ``(rms_norm(kept) * weight, kept)``, where ``kept = residual + sum``; new tensors.
        """
        return reduce_and_norm(
            self.runner,
            self._traced if timeout is None else None,
            lambda rows: self.all_reduce(rows, timeout=timeout),
            x,
            residual,
            weight,
            epsilon,
            timeout,
        )

    @overload
    def all_gather(
        self, x: Tensor, dim: int = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, x: Tensor, dim: int = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def all_gather(
        self, x: Tensor, dim: int = ..., *, out: Out = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
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
            x: (..., s, ...), the same shape and dtype on all ranks.
            dim: along which to concatenate.
            out: (..., N * s, ...).
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            (..., N * s, ...), contiguous; ``x`` itself in a group of one.
        """
        traced = self._traced
        if traced and is_compiling() and out is None and not async_op and timeout is None:
            return traced.all_gather(x, check_dim(dim, x))
        run = self.runner
        if not async_op and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("all_gather", timeout, x, dim, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        shape = resized(x.shape, dim, n * x.shape[dim])
        if n == 1:
            return run.identity("all_gather", x, out, async_op)
        source = plain(x)
        buffer, finish = landing_pieces(run.new, out, shape, dim, n, source, x)
        operation = Operation(
            "all_gather", source, buffer, async_op, timeout, shape=x.shape, dim=dim
        )
        return run.run(operation, buffer, finish)

    @overload
    def all_gather_(self, x: Tensor, dim: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_gather_(self, x: Tensor, dim: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    @overload
    def all_gather_(
        self, x: Tensor, dim: int = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def all_gather_(
        self, x: Tensor, dim: int = -1, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """`all_gather` of part ``rank`` of each ``x``. Collective: yes, every member.

        Args:
            x: (..., N * s, ...), of which part ``rank`` along ``dim`` is this rank's input.
            dim: along which the parts lie.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            ``x``, filled.
        """
        mine = self.runner.copy_of_part(x, dim, self.runner.rank)
        return self.all_gather(mine, dim, out=x, async_op=async_op, timeout=timeout)

    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; each rank keeps its part. Collective: yes, every member.

        Args:
            x: (..., N * s, ...), the same shape and dtype on all ranks.
            dim: along which rank r gets part r.
            op: what `check_reduction` accepts for the dtype.
            out: (..., s, ...).
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            (..., s, ...), contiguous; ``x`` itself in a group of one.
        """
        traced = self._traced
        if traced and is_compiling() and out is None and not async_op and timeout is None:
            return traced.reduce_scatter(x, check_dim(dim, x), op)
        run = self.runner
        if not async_op and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("reduce_scatter", timeout, x, dim, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        check_reduction(op, x.dtype)
        dim = check_dim(dim, x)
        n = run.world_size
        shape = resized(x.shape, dim, equal_share(x.shape[dim], n, dim))
        if n == 1:
            return run.identity("reduce_scatter", x, out, async_op)
        source = pieces_first(x, dim, n)
        buffer, finish = landing(run.new, out, shape, source, x)
        operation = Operation(
            "reduce_scatter", source, buffer, async_op, timeout, op=op, shape=x.shape, dim=dim
        )
        return run.run(operation, buffer, finish)

    @overload
    def reduce_scatter_(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def reduce_scatter_(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter_(
        self, x: Tensor, dim: int = ..., *, op: ReduceOp = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def reduce_scatter_(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """`reduce_scatter` into the first part of ``x``. Collective: yes, every member.

        Args:
            x: (..., N * s, ...); what is not in the first part is left as it was.
            dim: along which the parts lie.
            op: what `check_reduction` accepts for the dtype.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            The first part: a view of ``x``, (..., s, ...); in a group of one ``x`` itself.
        """
        out = self.runner.part(x, dim, 0)
        return self.reduce_scatter(x, dim, op=op, out=out, async_op=async_op, timeout=timeout)

    def _reduce_by_nodes(
        self, x: Tensor, op: ReduceOp, out: Out, async_op: bool, timeout: Timeout
    ) -> Tensor | Work[Tensor]:
        """`all_reduce`, ``hierarchical``, where no nodes are known: all ranks as on one."""
        return self.all_reduce(x, op=op, out=out, async_op=async_op, timeout=timeout)
