"""The verbs between two ranks, and the barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from device_comm.operation import NO_TENSOR, Operation
from device_comm.verbs.checks import (
    Later,
    Maybe,
    Now,
    Out,
    Shape,
    Timeout,
    check_out,
    check_peer,
    check_shape,
    check_tensor,
    materialized,
    output_buffer,
)
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError

if TYPE_CHECKING:
    from device_comm.verbs.runner import Runner
    from device_comm.work import Work


class PointToPointVerbs:
    """Messages and the barrier. `device_comm.communicator` has the common rules.

    Messages of one rank to another arrive in the order of their sends. Sender and receiver pass the
    same shape and dtype.
    """

    runner: Runner

    def send(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> None:
        """Send ``x`` to rank ``dst``. Collective: no, the two ranks only.

        Returns when ``x`` may be changed, which may be before it is received. ``dst`` is another
        rank in the group; None: the next rank, modulo N.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank + 1) % run.world_size if dst is None else dst
            if shortcut.message("send", timeout, x, peer) is not NotImplemented:
                return
        self._start_send(x, dst, async_op=False, timeout=timeout)

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a new contiguous tensor on the device, uninitialised, for a receive.

        A large one may reuse memory, which is faster than fresh pages.
        """
        return self.runner.empty(shape, dtype)

    def sends_eagerly(self, dst: int, size: int) -> bool:
        """Return True if a `send` of ``size`` bytes to ``dst`` returns without its `recv`."""
        return self.runner.backend.sends_eagerly(dst, size)

    def isend(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> Work[None]:
        """Start a `send`; never block.

        Returns:
            A `Work` with time limit ``timeout``; ``x`` must not change until it is done. That may
                be before the receive. Closing a group then waits some seconds for the receive
                (`GroupCoordinator.close`); closing a communicator does not: see `flush`.
        """
        return self._start_send(x, dst, async_op=True, timeout=timeout)  # type: ignore[no-any-return]

    def recv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Out = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Receive the next message from rank ``src``. Collective: no, the two ranks only.

        ``size`` is a shape, an int for one dimension; ``size`` and ``dtype`` are optional with
        ``out``. ``src`` is another rank in the group; None: the previous rank, modulo N.

        Returns:
            ``out``, or a new contiguous tensor.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank - 1) % run.world_size if src is None else src
            if out is None and size is not None and dtype is not None:
                out, size, dtype = run.empty(size, dtype), None, None
            if out is not None and size is None and dtype is None:
                done = shortcut.message("recv", timeout, out, peer)
                if done is not NotImplemented:
                    return out
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=False, timeout=timeout
        )

    def irecv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Out = None,
        timeout: Timeout = None,
    ) -> Work[Tensor]:
        """Start a `recv`; return a `Work` of the tensor with time limit ``timeout``."""
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=True, timeout=timeout
        )

    def recv_series(
        self,
        following: Callable[[], Sequence[Tensor]],
        src: int,
        *,
        timeout: Timeout = None,
    ) -> None:
        """Receive tensors from ``src`` whose number depends on earlier ones.

        Collective: no, the two ranks only.

        ``following`` returns the next contiguous tensors to fill, in the order of their sends,
        after the previous ones are filled; none: the end. ``timeout`` limits the whole series.
        """
        backend = self.runner.backend
        if not isinstance(timeout, Deadline):
            timeout = Deadline.after(backend.timeout if timeout is None else timeout)
        try:
            while tensors := following():
                for tensor in tensors:
                    self.recv(out=tensor, src=src, timeout=timeout)
        except CoordinatorError as error:
            backend.fail(error)
            raise

    def irecv_series(self, following: Callable[[], Sequence[Tensor]], src: int) -> Work[None]:
        """Start a `recv_series`, which continues in the background.

        Any thread may call ``following``. Raises `NotImplementedError` if not supported.
        """
        src = self._check_peer("src", src, -1)
        offered = self.runner.backend.capabilities
        if not offered.series:
            raise NotImplementedError(f"{offered.backend} has no irecv_series")
        operation = Operation("recv", background=True, timeout=None, peer=src, following=following)
        return self.runner.run(operation, None)  # type: ignore[no-any-return]

    @overload
    def barrier(self, **how: Unpack[Now]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[Later]) -> Work[None]: ...
    @overload
    def barrier(self, **how: Unpack[Maybe]) -> Work[None] | None: ...
    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work[None] | None:
        """Return after every rank has called. Collective: yes, every member."""
        run = self.runner
        if not async_op and (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("barrier", timeout)
            if done is not NotImplemented:
                return None
        if run.world_size == 1:
            return run.skip("barrier", None, async_op)  # type: ignore[no-any-return]
        operation = Operation("barrier", NO_TENSOR, NO_TENSOR, async_op, timeout)
        return run.run(operation, None)  # type: ignore[no-any-return]

    def _start_send(self, x: Tensor, dst: int | None, *, async_op: bool, timeout: Timeout) -> Any:
        run = self.runner
        check_tensor("x", x, run.device)
        peer = self._check_peer("dst", dst, 1)
        source = materialized(x)
        operation = Operation("send", source, NO_TENSOR, async_op, timeout, peer=peer)
        return run.run(operation, None)

    def _start_recv(
        self,
        size: Shape | None,
        dtype: torch.dtype | None,
        src: int | None,
        out: Out,
        *,
        async_op: bool,
        timeout: Timeout,
    ) -> Any:
        run = self.runner
        peer = self._check_peer("src", src, -1)
        if out is None:
            if size is None or dtype is None:
                raise ValueError("recv needs size and dtype, or out")
            buffer, finish = run.empty(size, dtype), None
        else:
            shape = out.shape if size is None else check_shape("size", size)
            check_out(out, shape, out.dtype if dtype is None else dtype, run.device)
            buffer, finish = output_buffer(run.new, out, out.shape, out, None)
        operation = Operation("recv", NO_TENSOR, buffer, async_op, timeout, peer=peer)
        return run.run(operation, buffer, finish)

    def _check_peer(self, label: str, peer: int | None, step: int) -> int:
        run = self.runner
        rank = (run.rank + step) % run.world_size if peer is None else peer
        return check_peer(label, rank, run.rank, run.world_size)
