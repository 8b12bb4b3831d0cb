"""The trailing-underscore forms: the same verbs, with the result in the caller's tensor.

Where input and result differ in size, the tensor has room for the larger one, and the
smaller one is a part of it: that of this rank in the gathering forms, the first one in the
scattering forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device_comm.checks import check_dim, check_rank, check_tensor, equal_share
from device_comm.p2p import PointToPointVerbs
from device_comm.reduce_op import ReduceOp
from device_comm.rooted import RootedVerbs
from device_comm.symmetric import SymmetricVerbs
from device_comm.uneven import UnevenVerbs

if TYPE_CHECKING:
    from torch import Tensor

    from shm_broadcast.deadline import Deadline


class InPlaceVerbs(SymmetricVerbs, UnevenVerbs, RootedVerbs, PointToPointVerbs):
    """In-place forms. Each takes ``async_op`` and ``timeout`` as the verb it is a form of."""

    def all_reduce_(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`all_reduce` into ``x``. Collective: yes, every member. Returns ``x``."""
        return self.all_reduce(x, op=op, out=x, async_op=async_op, timeout=timeout)

    def broadcast_(
        self,
        x: Tensor,
        *,
        src: int = 0,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`broadcast` into ``x``. Collective: yes, every member. Returns ``x``."""
        return self.broadcast(x, src=src, out=x, async_op=async_op, timeout=timeout)

    def reduce_(
        self,
        x: Tensor,
        *,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`reduce` into the ``x`` of ``dst``; the others' stay. Collective: yes, every member.

        Returns:
            ``x`` on ``dst``, None elsewhere.
        """
        out = x if self.rank == dst else None
        return self.reduce(x, dst=dst, op=op, out=out, async_op=async_op, timeout=timeout)

    def all_gather_(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`all_gather` of part ``rank`` of each ``x``. Collective: yes, every member.

        Args:
            x: (..., N * s, ...), of which part ``rank`` along ``dim`` is this rank's input.
            dim: along which the parts lie.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            ``x``, filled.
        """
        mine = self._part(x, dim, self.rank).clone()
        return self.all_gather(mine, dim=dim, out=x, async_op=async_op, timeout=timeout)

    def reduce_scatter_(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`reduce_scatter` into the first part of ``x``. Collective: yes, every member.

        Args:
            x: (..., N * s, ...); what is not in the first part is left as it was.
            dim: along which the parts lie.
            op: what `check_reduction` accepts for the dtype.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            The first part: a view of ``x``, (..., s, ...).
        """
        out = self._part(x, dim, 0)
        return self.reduce_scatter(x, dim=dim, op=op, out=out, async_op=async_op, timeout=timeout)

    def all_to_all_(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`all_to_all` of equal parts, into ``x``. Collective: yes, every member. Returns ``x``."""
        return self.all_to_all(x, dim=dim, out=x, async_op=async_op, timeout=timeout)

    def gather_(
        self,
        x: Tensor,
        *,
        dst: int = 0,
        dim: int = -1,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`gather` into the ``x`` of ``dst``. Collective: yes, every member.

        Args:
            x: on ``dst`` (..., N * s, ...), of which part ``dst`` is its own input;
                elsewhere (..., s, ...).
            dst: a rank in the group.
            dim: along which the parts lie.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            ``x`` on ``dst``, None elsewhere.
        """
        check_rank("dst", dst, self.world_size)
        if self.rank != dst:
            return self.gather(x, dst=dst, dim=dim, async_op=async_op, timeout=timeout)
        mine = self._part(x, dim, dst).clone()
        return self.gather(mine, dst=dst, dim=dim, out=x, async_op=async_op, timeout=timeout)

    def scatter_(
        self,
        x: Tensor,
        *,
        src: int = 0,
        dim: int = -1,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """`scatter` of the ``x`` of ``src``, into each ``x``. Collective: yes, every member.

        Args:
            x: on ``src`` (..., N * s, ...), whose first part becomes its own result;
                elsewhere (..., s, ...).
            src: a rank in the group.
            dim: along which the parts lie.
            async_op: return a `Work` of the result.
            timeout: seconds; None: the communicator's.

        Returns:
            (..., s, ...): on ``src`` a view of ``x``, elsewhere ``x``.
        """
        check_rank("src", src, self.world_size)
        if self.rank != src:
            return self.scatter(None, src=src, dim=dim, out=x, async_op=async_op, timeout=timeout)
        out = self._part(x, dim, 0)
        return self.scatter(x, src=src, dim=dim, out=out, async_op=async_op, timeout=timeout)

    def _part(self, x: Tensor, dim: int, index: int) -> Tensor:
        """Part ``index`` of N of ``x`` along ``dim``: a view."""
        check_tensor("x", x, self.device)
        dim = check_dim(dim, x)
        share = equal_share(x.shape[dim], self.world_size, dim)
        return x.detach().narrow(dim, index * share, share)
