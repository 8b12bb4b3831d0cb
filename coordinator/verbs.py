"""The verbs over tensors, as a group offers them: the device communicator's, by name.

`device_comm.base` says what all verbs share: out of place, what is validated, what is raised,
and that a deadline that passes ends the group. Each verb is documented in full where device
communicators have it: `device_comm.symmetric`, ``rooted``, ``uneven``, ``in_place``, ``p2p``.
Here ``dim`` may be given by position, as vLLM's users do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from coordinator import compile_ops
from coordinator.member import Member
from device_comm import ReduceOp, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.hierarchy import Hierarchy

Timeout = float | None
"""Seconds that a call may take; None: what the group allows."""


class Options(TypedDict, total=False):
    """What all verbs take besides their own.

    Attributes:
        async_op: return a `Work` at once.
        timeout: seconds.
    """

    async_op: bool
    timeout: Timeout


class TensorVerbs(Member):
    """Collectives over tensors on the group's device.

    ``async_op=True`` returns a `device_comm.Work`; ``await`` it, or call its ``wait()``, for
    what the call would have returned. A group of one returns its input itself.

    Attributes:
        hierarchy: the group seen as its nodes.
    """

    hierarchy: Hierarchy

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        hierarchical: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The reduction of every ``x``. Collective: yes, every member.

        ``hierarchical``: within each node first, then between them; done when this returns.
        """
        if hierarchical:
            result = self.hierarchy.all_reduce(x, op=op, out=out, timeout=timeout)
            return Work(result) if async_op else result
        if self._in_graph(out, async_op, timeout):
            if self.world_size == 1:
                return x
            return compile_ops.all_reduce(x, int(op), self.unique_name)
        return self.device_communicator.all_reduce(
            x, op=op, out=out, async_op=async_op, timeout=timeout
        )

    def all_reduce_(
        self, x: Tensor, *, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]
    ) -> Any:
        """As `all_reduce`, into ``x``. Collective: yes, every member."""
        return self.device_communicator.all_reduce_(x, op=op, **options)

    def all_gather(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Every ``x`` (..., s, ...), concatenated along ``dim``. Collective: yes, every member."""
        if self._in_graph(out, async_op, timeout):
            if self.world_size == 1:
                return x
            return compile_ops.all_gather(x, dim, self.world_size, self.unique_name)
        return self.device_communicator.all_gather(
            x, dim=dim, out=out, async_op=async_op, timeout=timeout
        )

    def all_gather_(self, x: Tensor, dim: int = -1, **options: Unpack[Options]) -> Any:
        """Fill ``x`` from each member's own part of it. Collective: yes, every member."""
        return self.device_communicator.all_gather_(x, dim=dim, **options)

    def all_gatherv(
        self,
        x: Tensor | Sequence[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        **options: Unpack[Options],
    ) -> Any:
        """As `all_gather`, with ``sizes[r]`` rows from rank r; of a list, each tensor.

        Collective: yes, every member.
        """
        return self.device_communicator.all_gatherv(x, dim=dim, sizes=sizes, out=out, **options)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = -1,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """This member's part, along ``dim``, of the reduction. Collective: yes, every member."""
        if self._in_graph(out, async_op, timeout):
            if self.world_size == 1:
                return x
            return compile_ops.reduce_scatter(x, dim, int(op), self.world_size, self.unique_name)
        return self.device_communicator.reduce_scatter(
            x, dim=dim, op=op, out=out, async_op=async_op, timeout=timeout
        )

    def reduce_scatter_(
        self, x: Tensor, dim: int = -1, *, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]
    ) -> Any:
        """As `reduce_scatter`, into the first part of ``x``. Collective: yes, every member."""
        return self.device_communicator.reduce_scatter_(x, dim=dim, op=op, **options)

    def reduce_scatterv(
        self,
        x: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """As `reduce_scatter`, with ``sizes[r]`` rows for rank r. Collective: yes, every member."""
        return self.device_communicator.reduce_scatterv(
            x, dim=dim, sizes=sizes, op=op, out=out, **options
        )

    def reduce_scatterv_into_output(
        self,
        x: Tensor,
        output: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        **options: Unpack[Options],
    ) -> Any:
        """As `reduce_scatterv`, into ``output``, which is returned. Collective: yes."""
        return self.reduce_scatterv(x, dim, sizes, op=op, out=output, **options)

    def all_to_all(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Part r of ``x`` goes to rank r. Collective: yes, every member."""
        return self.device_communicator.all_to_all(
            x, dim=dim, input_sizes=input_sizes, output_sizes=output_sizes, out=out, **options
        )

    def all_to_all_(self, x: Tensor, dim: int = 0, **options: Unpack[Options]) -> Any:
        """As `all_to_all` of equal parts, into ``x``. Collective: yes, every member."""
        return self.device_communicator.all_to_all_(x, dim=dim, **options)

    def broadcast(
        self, x: Tensor, src: int = 0, *, out: Tensor | None = None, **options: Unpack[Options]
    ) -> Any:
        """The ``x`` of rank ``src``, in a tensor of its own. Collective: yes, every member."""
        return self.device_communicator.broadcast(x, src=src, out=out, **options)

    def broadcast_(self, x: Tensor, src: int = 0, **options: Unpack[Options]) -> Any:
        """As `broadcast`, into ``x``. Collective: yes, every member."""
        return self.device_communicator.broadcast_(x, src=src, **options)

    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """The reduction on rank ``dst``, None elsewhere. Collective: yes, every member."""
        return self.device_communicator.reduce(x, dst=dst, op=op, out=out, **options)

    def reduce_(
        self, x: Tensor, dst: int = 0, *, op: ReduceOp = ReduceOp.SUM, **options: Unpack[Options]
    ) -> Any:
        """As `reduce`, into the ``x`` of ``dst``. Collective: yes, every member."""
        return self.device_communicator.reduce_(x, dst=dst, op=op, **options)

    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = -1,
        *,
        out: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Every ``x``, concatenated, on rank ``dst``; None elsewhere.

        Collective: yes, every member.
        """
        return self.device_communicator.gather(x, dst=dst, dim=dim, out=out, **options)

    def gather_(self, x: Tensor, dst: int = 0, dim: int = -1, **options: Unpack[Options]) -> Any:
        """As `gather`, into the ``x`` of ``dst``. Collective: yes, every member."""
        return self.device_communicator.gather_(x, dst=dst, dim=dim, **options)

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = -1,
        *,
        out: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Part r of the ``x`` of ``src``, on rank r; the others pass None, and ``out``.

        Collective: yes, every member.
        """
        return self.device_communicator.scatter(x, src=src, dim=dim, out=out, **options)

    def scatter_(self, x: Tensor, src: int = 0, dim: int = -1, **options: Unpack[Options]) -> Any:
        """As `scatter`, into ``x``. Collective: yes, every member."""
        return self.device_communicator.scatter_(x, src=src, dim=dim, **options)

    def _in_graph(self, out: Tensor | None, async_op: bool, timeout: Timeout) -> bool:
        """Whether `torch.compile` traces this call, which an op of its graph can express."""
        return torch.compiler.is_compiling() and out is None and not async_op and timeout is None
