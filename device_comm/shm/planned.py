"""The primitives of the collectives, as plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.base import Call, DeviceCommunicator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from device_comm.reduce_op import ReduceOp
    from device_comm.shm.collective import Agreement
    from device_comm.shm.layout import GroupLayout
    from device_comm.shm.plan import Plan, Planner
    from device_comm.work import Pending


class PlannedVerbs(DeviceCommunicator):
    """What every collective plans; `_collect` carries it out."""

    _layout: GroupLayout
    _planner: Planner
    _agreement: Agreement

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        plan = self._planner.all_reduce(output, source, op, self._layout.whole_bytes)
        return self._collect(call, plan, output, source)

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        return self._collect(call, self._planner.all_gather(output, source), output, source)

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        plans = self._agreement.all_gatherv(output, source, sizes)
        return self._collect(call, plans, output, source)

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        plan = self._planner.reduce_scatter(output, source, op)
        return self._collect(call, plan, output, source)

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        plans = self._agreement.reduce_scatterv(output, source, sizes, op)
        return self._collect(call, plans, output, source)

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        plans = self._agreement.all_to_all(output, source, output_sizes, source_sizes)
        return self._collect(call, plans, output, source)

    def _all_to_all_equal(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        plan = self._planner.all_to_all(output, source, sizes)
        return self._collect(call, plan, output, source)

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        return self._collect(call, self._planner.broadcast(buffer, root), buffer)

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        plan = self._planner.reduce(output, source, root, op)
        return self._collect(call, plan, output, source)

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        return self._collect(call, self._planner.gather(output, source, root), output, source)

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        return self._collect(call, self._planner.scatter(output, source, root), output, source)

    def _barrier(self, call: Call) -> Pending | None:
        return self._collect(call, self._planner.barrier())

    def _collect(
        self, call: Call, plans: Plan | Iterator[Plan], *keep: Tensor | None
    ) -> Pending | None:
        """Carry out one collective, behind those under way; ``keep`` is the memory used."""
        raise NotImplementedError
