"""The verbs in which one rank, the root, gives or gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device_comm.arrange import (
    landing,
    landing_pieces,
    pieces_first,
    plain,
    resized,
    shares_memory,
)
from device_comm.backend import Backend
from device_comm.checks import check_dim, check_out, check_rank, check_tensor, equal_share
from device_comm.reduce_op import ReduceOp, check_reduction

if TYPE_CHECKING:
    from torch import Tensor

    from shm_broadcast.deadline import Deadline


class RootedVerbs(Backend):
    """Collectives with a root. See `device_comm.base` for what all verbs share."""

    def broadcast(
        self,
        x: Tensor,
        *,
        src: int = 0,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """The ``x`` of rank ``src``, on all ranks. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; only the values on ``src`` matter.
            src: a rank in the group.
            out: like ``x``; may be ``x`` itself.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            A tensor like ``x``, a new one on ``src`` too; ``x`` itself in a group of one.
        """
        check_tensor("x", x, self.device)
        check_rank("src", src, self.world_size)
        if out is not None:
            check_out(out, x.shape, x.dtype, self.device)
        if self.world_size == 1:
            return self._identity("broadcast", x, out, async_op)
        buffer, finish = landing(self._empty, out, x.shape, x, x, in_place=out is x)
        if x.numel() == 0:
            return self._skip("broadcast", buffer if out is None else out, async_op)
        if self.rank == src and not shares_memory(buffer, x):
            buffer.copy_(x.detach())
        return self._run(
            "broadcast",
            lambda call: self._broadcast(buffer, src, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
        )

    def reduce(
        self,
        x: Tensor,
        *,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, for rank ``dst``. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; unchanged on all.
            dst: a rank in the group.
            op: what `check_reduction` accepts for the dtype.
            out: on ``dst`` only: like ``x``; may be ``x`` itself.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            On ``dst`` a tensor like ``x``, or ``x`` itself in a group of one; elsewhere None.
        """
        check_tensor("x", x, self.device)
        check_reduction(op, x.dtype)
        self._check_root("dst", dst, out)
        if out is not None:
            check_out(out, x.shape, x.dtype, self.device)
        if self.world_size == 1:
            return self._identity("reduce", x, out, async_op)
        source = plain(x)
        buffer, finish = None, None
        if self.rank == dst:
            buffer, finish = landing(self._empty, out, x.shape, source, x, in_place=out is x)
        if x.numel() == 0:
            return self._skip("reduce", buffer if out is None else out, async_op)
        return self._run(
            "reduce",
            lambda call: self._reduce(buffer, source, dst, op, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def gather(
        self,
        x: Tensor,
        *,
        dst: int = 0,
        dim: int = -1,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Concatenate the ``x`` of all ranks, for rank ``dst``. Collective: yes, every member.

        Args:
            x: (..., s, ...), the same shape and dtype on all ranks.
            dst: a rank in the group.
            dim: along which to concatenate.
            out: on ``dst`` only: (..., N * s, ...).
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            On ``dst`` (..., N * s, ...), or ``x`` itself in a group of one; elsewhere None.
        """
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        n = self.world_size
        self._check_root("dst", dst, out)
        shape = resized(x.shape, dim, n * x.shape[dim])
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("gather", x, out, async_op)
        source = plain(x)
        buffer, finish = None, None
        if self.rank == dst:
            buffer, finish = landing_pieces(self._empty, out, shape, dim, n, source, x)
        if x.numel() == 0:
            return self._skip("gather", buffer if finish is None else finish(), async_op)
        return self._run(
            "gather",
            lambda call: self._gather(buffer, source, dst, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def scatter(
        self,
        x: Tensor | None,
        *,
        src: int = 0,
        dim: int = -1,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Give part r of the ``x`` of rank ``src`` to rank r. Collective: yes, every member.

        Args:
            x: on ``src`` (..., N * s, ...); elsewhere None.
            src: a rank in the group.
            dim: along which ``x`` is cut.
            out: (..., s, ...); needed on all ranks but ``src``, which know no shape else.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            (..., s, ...), contiguous unless ``out`` is not; ``x`` itself in a group of one.
        """
        check_rank("src", src, self.world_size)
        if self.rank == src:
            return self._scatter_own(x, src, dim, out, async_op, timeout)
        if x is not None:
            raise ValueError(f"x is given on rank {src} only; this is rank {self.rank}")
        if out is None:
            raise ValueError(f"rank {self.rank} needs out= to know the shape that it gets")
        check_tensor("out", out, self.device)
        check_dim(dim, out)
        buffer, finish = landing(self._empty, out, out.shape, out, None)
        if out.numel() == 0:
            return self._skip("scatter", out, async_op)
        return self._run(
            "scatter",
            lambda call: self._scatter(buffer, None, src, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
        )

    def _scatter_own(
        self,
        x: Tensor | None,
        src: int,
        dim: int,
        out: Tensor | None,
        async_op: bool,
        timeout: float | Deadline | None,
    ) -> Any:
        if x is None:
            raise ValueError(f"rank {src} is the source: it needs x")
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        n = self.world_size
        shape = resized(x.shape, dim, equal_share(x.shape[dim], n, dim))
        if out is not None:
            check_out(out, shape, x.dtype, self.device)
        if n == 1:
            return self._identity("scatter", x, out, async_op)
        source = pieces_first(x, dim, n)
        buffer, finish = landing(self._empty, out, shape, source, x)
        if x.numel() == 0:
            return self._skip("scatter", buffer if out is None else out, async_op)
        return self._run(
            "scatter",
            lambda call: self._scatter(buffer, source, src, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def _check_root(self, label: str, root: int, out: Tensor | None) -> None:
        check_rank(label, root, self.world_size)
        if out is not None and self.rank != root:
            raise ValueError(f"out is given on rank {root} only; this is rank {self.rank}")
