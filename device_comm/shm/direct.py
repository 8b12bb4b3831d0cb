"""The short way to the collectives of plain tensors, through the C extension.

What `device_comm.base` checks and arranges in Python for every call costs ten times as much as
moving a kilobyte. So the extension is asked first: it takes the calls that need none of that, and
leaves the others, wrong ones among them, to the long way. It answers with the result, with
NotImplemented, or with Ellipsis: begun, and blocked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device_comm.base import DeviceCommunicator
from device_comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from device_comm._native import Comm
    from device_comm.work import Work
    from shm_broadcast.deadline import Deadline


class DirectVerbs(DeviceCommunicator):
    """The verbs that have a short way. `symmetric`, `uneven` and `rooted` document them."""

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """As `SymmetricVerbs.all_reduce`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.all_reduce(x, op, out)
            if result is not NotImplemented:
                return self._finish(direct, "all_reduce", timeout) if result is ... else result
        return super().all_reduce(x, op=op, out=out, async_op=async_op, timeout=timeout)

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """As `SymmetricVerbs.all_gather`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.all_gather(x, dim, out)
            if result is not NotImplemented:
                return self._finish(direct, "all_gather", timeout) if result is ... else result
        return super().all_gather(x, dim=dim, out=out, async_op=async_op, timeout=timeout)

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
        """As `SymmetricVerbs.reduce_scatter`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.reduce_scatter(x, dim, op, out)
            if result is not NotImplemented:
                return self._finish(direct, "reduce_scatter", timeout) if result is ... else result
        return super().reduce_scatter(
            x, dim=dim, op=op, out=out, async_op=async_op, timeout=timeout
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
        """As `UnevenVerbs.all_to_all`. Collective: yes, every member."""
        plain = not async_op and input_sizes is None and output_sizes is None
        if plain and (direct := self._short_way(timeout)) is not None:
            result = direct.all_to_all(x, dim, out)
            if result is not NotImplemented:
                return self._finish(direct, "all_to_all", timeout) if result is ... else result
        return super().all_to_all(
            x,
            dim=dim,
            input_sizes=input_sizes,
            output_sizes=output_sizes,
            out=out,
            async_op=async_op,
            timeout=timeout,
        )

    def broadcast(
        self,
        x: Tensor,
        *,
        src: int = 0,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """As `RootedVerbs.broadcast`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.broadcast(x, src, out)
            if result is not NotImplemented:
                return self._finish(direct, "broadcast", timeout) if result is ... else result
        return super().broadcast(x, src=src, out=out, async_op=async_op, timeout=timeout)

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
        """As `RootedVerbs.reduce`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.reduce(x, dst, op, out)
            if result is not NotImplemented:
                return self._finish(direct, "reduce", timeout) if result is ... else result
        return super().reduce(x, dst=dst, op=op, out=out, async_op=async_op, timeout=timeout)

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
        """As `RootedVerbs.gather`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.gather(x, dst, dim, out)
            if result is not NotImplemented:
                return self._finish(direct, "gather", timeout) if result is ... else result
        return super().gather(x, dst=dst, dim=dim, out=out, async_op=async_op, timeout=timeout)

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
        """As `RootedVerbs.scatter`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.scatter(x, src, dim, out)
            if result is not NotImplemented:
                return self._finish(direct, "scatter", timeout) if result is ... else result
        return super().scatter(x, src=src, dim=dim, out=out, async_op=async_op, timeout=timeout)

    def barrier(
        self, *, async_op: bool = False, timeout: float | Deadline | None = None
    ) -> Work[None] | None:
        """As `PointToPointVerbs.barrier`. Collective: yes, every member."""
        if not async_op and (direct := self._short_way(timeout)) is not None:
            result = direct.barrier()
            if result is not NotImplemented:
                if result is ...:
                    self._finish(direct, "barrier", timeout)
                return None
        return super().barrier(async_op=async_op, timeout=timeout)

    def send(
        self, x: Tensor, dst: int | None = None, *, timeout: float | Deadline | None = None
    ) -> None:
        """As `PointToPointVerbs.send`. Collective: no, the two ranks only."""
        peer = (self.rank + 1) % self.world_size if dst is None else dst
        if self._short_message("send", x, peer, timeout) is NotImplemented:
            super().send(x, dst, timeout=timeout)

    def recv(
        self,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | Deadline | None = None,
    ) -> Tensor:
        """As `PointToPointVerbs.recv`. Collective: no, the two ranks only."""
        peer = (self.rank - 1) % self.world_size if src is None else src
        if out is None and size is not None and dtype is not None:
            out, size, dtype = self.empty(size, dtype), None, None
        if out is not None and size is None and dtype is None:
            result = self._short_message("recv", out, peer, timeout)
            if result is not NotImplemented:
                return out
        return super().recv(size, dtype, src, out=out, timeout=timeout)

    def _short_message(
        self, verb: str, x: Tensor, peer: int, timeout: float | Deadline | None
    ) -> Any:
        """Send or receive through the extension; NotImplemented: it cannot, and has not begun."""
        raise NotImplementedError

    def _short_way(self, timeout: float | Deadline | None) -> Comm | None:
        """The extension, if a call with such a ``timeout`` may go through it now."""
        raise NotImplementedError

    def _finish(self, direct: Comm, verb: str, timeout: float | Deadline | None) -> Any:
        """Wait for the call that is blocked in the extension, and return its result."""
        raise NotImplementedError
