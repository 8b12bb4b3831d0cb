"""The verbs of equal shares in which every rank gives and every rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device_comm.arrange import landing, landing_pieces, pieces_first, plain, resized
from device_comm.backend import Backend
from device_comm.checks import check_dim, check_out, check_tensor, equal_share
from device_comm.reduce_op import ReduceOp, check_reduction

if TYPE_CHECKING:
    from torch import Tensor

    from shm_broadcast.deadline import Deadline


class SymmetricVerbs(Backend):
    """Collectives without a root. See `device_comm.base` for what all verbs share."""

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks.
            op: what `check_reduction` accepts for the dtype.
            out: like ``x``; may be ``x`` itself.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            A tensor like ``x``; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        check_reduction(op, x.dtype)
        if out is not None and out is not x:
            check_out(out, x.shape, x.dtype, self.device)
        if self.world_size == 1:
            return self._identity("all_reduce", x, out, async_op)
        source = plain(x)
        buffer, finish = landing(self._empty, out, x.shape, source, x, in_place=out is x)
        if x.numel() == 0:
            return self._skip("all_reduce", buffer if out is None else out, async_op)
        return self._run(
            "all_reduce",
            lambda call: self._all_reduce(buffer, source, op, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, in rank order. Collective: yes, every member.

        Args:
            x: (..., s, ...), the same shape and dtype on all ranks.
            dim: along which to concatenate.
            out: (..., N * s, ...).
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            (..., N * s, ...), contiguous; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        n = self.world_size
        shape = resized(x.shape, dim, n * x.shape[dim])
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("all_gather", x, out, async_op)
        source = plain(x)
        buffer, finish = landing_pieces(self._empty, out, shape, dim, n, source, x)
        if x.numel() == 0:
            return self._skip("all_gather", buffer if finish is None else finish(), async_op)
        return self._run(
            "all_gather",
            lambda call: self._all_gather(buffer, source, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; each rank keeps its part. Collective: yes, every member.

        Args:
            x: (..., N * s, ...), the same shape and dtype on all ranks.
            dim: along which rank r gets part r.
            op: what `check_reduction` accepts for the dtype.
            out: (..., s, ...).
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            (..., s, ...), contiguous; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        check_reduction(op, x.dtype)
        dim = check_dim(dim, x)
        n = self.world_size
        shape = resized(x.shape, dim, equal_share(x.shape[dim], n, dim))
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("reduce_scatter", x, out, async_op)
        source = pieces_first(x, dim, n)
        buffer, finish = landing(self._empty, out, shape, source, x)
        if x.numel() == 0:
            return self._skip("reduce_scatter", buffer if out is None else out, async_op)
        return self._run(
            "reduce_scatter",
            lambda call: self._reduce_scatter(buffer, source, op, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )
