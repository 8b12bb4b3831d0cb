"""Several backends as one: each operation goes to the backend that is chosen for it.

The choice depends only on the verb and the bytes of the whole tensor, which are the same on all
ranks, so all ranks choose the same; see `device_comm.choosing.selection`. For an all-to-all, where
the ranks' sizes may differ, one backend is chosen for all sizes. In the capture of a CUDA graph the
choice is among the backends that can be captured: all ranks have to capture the same operations.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from device_comm.backend import Backend, Capabilities
from device_comm.choice import Explanation
from device_comm.choosing.selection import size_of
from device_comm.operation import REDUCTIONS
from device_comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from device_comm.choosing.selection import Selection
    from device_comm.operation import Operation
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline


class SelectingBackend(Backend):
    """One rank's end of a group with several backends; it closes them.

    Reductions of different sizes may use different backends, whose results may differ in the last
    bits. For one size all ranks use the same backend.
    """

    def __init__(
        self,
        selection: Selection,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        """Choose by ``selection``, the same on all ranks. Collective: no.

        Args:
            selection: at least one candidate is not refused. All backends are of the same ranks, in
                the same order, on the same device and the same board.
            capturing: whether the current stream is being captured into a CUDA graph.

        Raises:
            ValueError: every candidate was refused, or the backends are of different groups.
        """
        able = [each.backend for each in selection.candidates if each.backend is not None]
        self._backends = list(dict.fromkeys(able))
        if not self._backends:
            raise ValueError("a selection needs a candidate that was not refused")
        first = self._backends[0]
        for each in self._backends[1:]:
            if (each.rank, each.world_size, each.device, each.members) != (
                first.rank,
                first.world_size,
                first.device,
                first.members,
            ):
                raise ValueError(f"{each.identity} and {first.identity} are not of one group")
        has = [backend.capabilities for backend in self._backends]
        capabilities = Capabilities(
            "+".join(dict.fromkeys(each.backend for each in has)),
            verbs=selection.verbs,
            identical=all(each.identical for each in has),
            stream_ordered=all(each.stream_ordered for each in has),
            detects_divergence=all(each.detects_divergence for each in has),
            detects_loss=all(each.detects_loss for each in has),
            sends_ahead=all(each.sends_ahead for each in has),
            overlaps=all(each.overlaps for each in has),
            normed=frozenset[torch.dtype]().union(
                *(
                    each.backend.capabilities.normed
                    for each in selection.chosen("all_reduce")
                    if each.backend is not None
                )
            ),
        )
        super().__init__(first.identity, capabilities)
        for backend in self._backends:
            self._closing.callback(backend.close)
        self.selection = selection
        self._capturing = capturing

    def explain(self) -> Explanation:
        """Which backend carries out each verb and size, and why. Collective: no."""
        refused = [
            (each.name, each.refused) for each in self.selection.candidates if each.backend is None
        ]
        for backend in self._backends:
            refused += backend.explain().refused
        return Explanation(self.name, tuple(self.selection.choices()), tuple(refused))

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """A context to capture graphs in, with all backends. Collective: yes, every member."""
        with ExitStack() as captures:
            for backend in self._backends:
                captures.enter_context(backend.graph_capture())
            yield

    def flush(self, deadline: Deadline) -> None:
        """Flush all backends."""
        for backend in self._backends:
            backend.flush(deadline)

    def check(self) -> None:
        """Check all backends."""
        for backend in self._backends:
            backend.check()

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """As the backend that is chosen for the sum of ``x``.

        The times of plain sums decide: norms are not measured themselves. Where a backend has both
        in one kernel, that saves what the norm would take as well, so near the size at which
        another one's sum becomes quicker the choice may be the slower one.
        """
        chosen = self._chosen("all_reduce", x.nbytes, (ReduceOp.SUM, x.dtype))
        return chosen.norms(x, weight)

    def goes_ahead(self, peer: int, size: int) -> bool:
        """As the backend that is chosen for a send of ``size`` bytes."""
        return self._chosen("send", size).goes_ahead(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """As the first backend; all are on the same device."""
        return self._backends[0].empty(shape, dtype, like)

    def discard(self) -> None:
        """Discard in all backends."""
        for backend in self._backends:
            backend.discard()

    def start(self, operation: Operation) -> Pending | None:
        """Start ``operation`` on the backend that is chosen for it."""
        size = size_of(operation, self.world_size)
        reduction = None
        if operation.verb in REDUCTIONS:
            reduction = (operation.op, operation.source.dtype)
        return self._chosen(operation.verb, size, reduction).start(operation)

    def _chosen(
        self, verb: str, size: int, reduction: tuple[ReduceOp, torch.dtype] | None = None
    ) -> Backend:
        """The backend for ``verb`` on a tensor of ``size`` bytes."""
        selection = self.selection
        if selection.captured is not selection and self._capturing():
            selection = selection.captured
        if reduction is None:
            chosen = selection.candidate(verb, size)
        else:
            chosen = selection.reducer(verb, size, *reduction)
        if chosen.backend is None:
            raise NotImplementedError(f"{self.name} {verb}: {chosen.name} was refused")
        return chosen.backend
