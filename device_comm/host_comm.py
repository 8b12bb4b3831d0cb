"""Tensors of a device by way of the host: slow, and possible wherever ranks can talk at all.

Inputs are copied to the host, moved by a communicator there, and results copied back. A call
returns once its result is there, and cannot be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from device_comm.base import DeviceCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.reduce_op import ReduceOp
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline


class HostComm(DeviceCommunicator):
    """One rank's end of a group whose tensors are on a device. One thread at a time."""

    def __init__(self, inner: DeviceCommunicator, device: torch.device | str) -> None:
        """Move tensors of ``device`` by ``inner``, which moves those of the host.

        Args:
            inner: it stays its maker's to close; calls made of it directly keep their order.
            device: this rank's.
        """
        super().__init__(
            rank=inner.rank,
            world_size=inner.world_size,
            device=device,
            capabilities=replace(inner.capabilities, backend="host"),
            name=inner.name,
            timeout=inner.timeout,
            watch=inner.watch,
            members=inner.members,
        )
        self._inner = inner

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """As that of the host's communicator. Collective: no."""
        self._inner.flush(timeout)

    def goes_ahead(self, dst: int, size: int) -> bool:
        """As that of the host's communicator. Collective: no."""
        return self._inner.goes_ahead(dst, size)

    def _discard(self) -> None:
        self._inner._discard()

    # --- collectives ---------------------------------------------------------------------

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._all_reduce(there, here, op, same), output, there
        )

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._all_gather(there, here, same), output, there
        )

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._all_gatherv(there, here, sizes, same), output, there
        )

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._reduce_scatter(there, here, op, same), output, there
        )

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call,
            lambda same: self._inner._reduce_scatterv(there, here, sizes, op, same),
            output,
            there,
        )

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        here, there = source.cpu(), _room(output)
        return self._run_on_host(
            call,
            lambda same: self._inner._all_to_all(there, here, output_sizes, source_sizes, same),
            output,
            there,
        )

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        there = buffer.cpu() if self.rank == root else _room(buffer)
        output = None if self.rank == root else buffer
        return self._run_on_host(
            call, lambda same: self._inner._broadcast(there, root, same), output, there
        )

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        here, there = source.cpu(), None if output is None else _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._reduce(there, here, root, op, same), output, there
        )

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        here, there = source.cpu(), None if output is None else _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._gather(there, here, root, same), output, there
        )

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        here, there = None if source is None else source.cpu(), _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._scatter(there, here, root, same), output, there
        )

    def _barrier(self, call: Call) -> Pending | None:
        return self._inner._launch(self._inner._barrier, call)

    # --- p2p -----------------------------------------------------------------------------

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        here = source.cpu()
        return self._run_on_host(call, lambda same: self._inner._send(here, peer, same))

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        there = _room(output)
        return self._run_on_host(
            call, lambda same: self._inner._recv(there, peer, same), output, there
        )

    def _run_on_host(
        self,
        call: Call,
        primitive: Callable[[Call], Pending | None],
        output: Tensor | None = None,
        there: Tensor | None = None,
    ) -> Pending | None:
        """Run ``primitive``, then copy ``there`` into ``output``, if there is one."""
        pending = self._inner._launch(primitive, call)
        if pending is not None:
            return _Returning(pending, output, there)
        if output is not None and there is not None:
            output.copy_(there)
        return None


class _Returning:
    """An operation on the host whose result has to come back."""

    def __init__(self, pending: Pending, output: Tensor | None, there: Tensor | None) -> None:
        self._pending = pending
        self._output = output
        self._there = there

    def ready(self) -> bool:
        return self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        self._pending.wait(deadline)
        if self._output is not None and self._there is not None:
            self._output.copy_(self._there)
            self._output = self._there = None


def _room(like: Tensor) -> Tensor:
    """Memory of the host for the values of ``like``."""
    return torch.empty(like.shape, dtype=like.dtype)
