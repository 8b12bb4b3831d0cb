"""The verbs between two ranks, and the barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device_comm.arrange import landing, plain
from device_comm.backend import Backend
from device_comm.checks import check_out, check_rank, check_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from device_comm.work import Work
    from shm_broadcast.deadline import Deadline


class PointToPointVerbs(Backend):
    """Sending, receiving, meeting. See `device_comm.base` for what all verbs share.

    What one rank sends to another arrives in the order sent; sender and receiver agree on
    shape and dtype.
    """

    def send(
        self, x: Tensor, dst: int | None = None, *, timeout: float | Deadline | None = None
    ) -> None:
        """Send ``x`` to rank ``dst``. Collective: no, the two ranks only.

        Args:
            x: any shape and dtype.
            dst: a rank in the group, not this one; None: the next rank, modulo N.
            timeout: seconds; None: the communicator's.

        Returns:
            None, once ``x`` may be changed. Whether it has been received then is not said.
        """
        self._start_send(x, dst, async_op=False, timeout=timeout)

    def goes_ahead(self, dst: int, size: int) -> bool:  # noqa: ARG002 - some depend on them
        """Whether a `send` of ``size`` bytes to rank ``dst`` would now return without its `recv`.

        Collective: no. Else it would wait; an `isend` never does.
        """
        return self.capabilities.sends_ahead or self.capabilities.stream_ordered

    def isend(
        self, x: Tensor, dst: int | None = None, *, timeout: float | Deadline | None = None
    ) -> Work[None]:
        """As `send`, at once and without a matching `recv`. Collective: no.

        Returns:
            A `Work`; ``x`` must not be changed until it is done. ``timeout`` is its `wait`'s.
        """
        return self._start_send(x, dst, async_op=True, timeout=timeout)  # type: ignore[no-any-return]

    def recv(
        self,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | Deadline | None = None,
    ) -> Tensor:
        """What rank ``src`` sends next to this rank. Collective: no, the two ranks only.

        Args:
            size: the shape; may be left out if ``out`` is given.
            dtype: the dtype; may be left out if ``out`` is given.
            src: a rank in the group, not this one; None: the previous rank, modulo N.
            out: where to put it.
            timeout: seconds; None: the communicator's.

        Returns:
            ``out``, or a new contiguous tensor.
        """
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=False, timeout=timeout
        )

    def irecv(
        self,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | Deadline | None = None,
    ) -> Work[Tensor]:
        """As `recv`, at once. Collective: no.

        Returns:
            A `Work` of the tensor. ``timeout`` is its `wait`'s.
        """
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=True, timeout=timeout
        )

    def barrier(
        self, *, async_op: bool = False, timeout: float | Deadline | None = None
    ) -> Work[None] | None:
        """Return once every rank has come here. Collective: yes, every member.

        Args:
            async_op: return a `Work`.
            timeout: seconds; None: the communicator's.
        """
        if self.world_size == 1:
            return self._skip("barrier", None, async_op)  # type: ignore[no-any-return]
        return self._run(  # type: ignore[no-any-return]
            "barrier", self._barrier, None, async_op=async_op, timeout=timeout
        )

    def _start_send(
        self, x: Tensor, dst: int | None, *, async_op: bool, timeout: float | Deadline | None
    ) -> Any:
        check_tensor("x", x, self.device)
        peer = self._check_peer("dst", dst, 1)
        source = plain(x)
        if x.numel() == 0:
            return self._skip("send", None, async_op)
        return self._run(
            "send",
            lambda call: self._send(source, peer, call),
            None,
            async_op=async_op,
            timeout=timeout,
            keep=source,
        )

    def _start_recv(
        self,
        size: Sequence[int] | None,
        dtype: torch.dtype | None,
        src: int | None,
        out: Tensor | None,
        *,
        async_op: bool,
        timeout: float | Deadline | None,
    ) -> Any:
        peer = self._check_peer("src", src, -1)
        if out is None:
            if size is None or dtype is None:
                raise ValueError("recv needs size and dtype, or out")
            buffer, finish = self.empty(size, dtype), None
        else:
            shape = out.shape if size is None else tuple(size)
            check_out(out, shape, out.dtype if dtype is None else dtype, self.device)
            buffer, finish = landing(self._empty, out, out.shape, out, None)
        if buffer.numel() == 0:
            return self._skip("recv", buffer if out is None else out, async_op)
        return self._run(
            "recv",
            lambda call: self._recv(buffer, peer, call),
            buffer,
            finish,
            async_op=async_op,
            timeout=timeout,
        )

    def _check_peer(self, label: str, peer: int | None, step: int) -> int:
        rank = (self.rank + step) % self.world_size if peer is None else peer
        check_rank(label, rank, self.world_size)
        if rank == self.rank:
            raise ValueError(f"{label}={rank} is this rank itself")
        return rank
