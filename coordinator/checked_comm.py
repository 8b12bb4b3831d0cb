"""A debug mode: before each collective the members compare what they are about to do.

Shared-memory communicators notice divergence by themselves; torch's process groups hang or
hand out wrong data. `CheckedComm` wraps one of these: every collective is preceded by a
small all-gather of what each member issues, which about doubles the cost of small ones.
Messages between two members are not compared.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from device_comm import DeviceCommunicator
from shm_broadcast import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from device_comm import Call, Pending, ReduceOp
    from device_comm.choice import Explanation

_BYTES = 160
"""How much of what a member issues is compared."""


class CheckedComm(DeviceCommunicator):
    """``inner``, with `DivergenceError` where members issue different collectives."""

    def __init__(self, inner: DeviceCommunicator, over: DeviceCommunicator) -> None:
        """Wrap a communicator, which is closed with this one.

        Args:
            inner: moves the tensors.
            over: carries what is compared: ``inner``, or one of the same members on the CPU.
        """
        super().__init__(
            rank=inner.rank,
            world_size=inner.world_size,
            device=inner.device,
            capabilities=replace(inner.capabilities, detects_divergence=True),
            name=inner.name,
            timeout=inner.timeout,
            watch=inner.watch,
            members=inner.members,
        )
        self._inner = inner
        self._over = over

    def goes_ahead(self, dst: int, size: int) -> bool:
        """As that of ``inner``. Collective: no."""
        return self._inner.goes_ahead(dst, size)

    def _agree(self, call: Call, *about: object) -> None:
        """Compare this operation with everyone's.

        Raises:
            DivergenceError: names the first member that issued something else.
        """
        ours = " ".join([call.verb, *map(str, about)]).encode()[:_BYTES]
        row = torch.frombuffer(bytearray(ours.ljust(_BYTES)), dtype=torch.uint8)
        rows = torch.empty((self.world_size, _BYTES), dtype=torch.uint8)
        pending = self._over._all_gather(rows.view(-1), row, call)
        if pending is not None:
            pending.wait(call.deadline)
        for rank, theirs in enumerate(rows):
            text = bytes(theirs.numpy()).rstrip()
            if text != ours:
                raise DivergenceError(rank, ours.decode(), text.decode())

    def explain(self) -> Explanation:
        """As what it wraps. Collective: no."""
        return self._inner.explain()

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """As what it wraps; captured operations are compared once. Collective: yes."""
        with self._inner.graph_capture():
            yield

    def _discard(self) -> None:
        self._inner._discard()

    def _close(self) -> None:
        self._inner.close()

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, tuple(source.shape), op.name)
        return self._inner._all_reduce(output, source, op, call)

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        self._agree(call, source.dtype, tuple(source.shape))
        return self._inner._all_gather(output, source, call)

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, list(sizes))
        return self._inner._all_gatherv(output, source, sizes, call)

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, tuple(source.shape), op.name)
        return self._inner._reduce_scatter(output, source, op, call)

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, list(sizes), op.name)
        return self._inner._reduce_scatterv(output, source, sizes, op, call)

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        self._agree(call, source.dtype)
        return self._inner._all_to_all(output, source, output_sizes, source_sizes, call)

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        self._agree(call, buffer.dtype, tuple(buffer.shape), f"from {root}")
        return self._inner._broadcast(buffer, root, call)

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, tuple(source.shape), op.name, f"to {root}")
        return self._inner._reduce(output, source, root, op, call)

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        self._agree(call, source.dtype, tuple(source.shape), f"to {root}")
        return self._inner._gather(output, source, root, call)

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        self._agree(call, output.dtype, tuple(output.shape), f"from {root}")
        return self._inner._scatter(output, source, root, call)

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        return self._inner._send(source, peer, call)

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        return self._inner._recv(output, peer, call)

    def _barrier(self, call: Call) -> Pending | None:
        self._agree(call)
        return self._inner._barrier(call)
