"""The verbs as kernels: which is asked for what. Reductions that have none go through torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.base import DeviceCommunicator
from device_comm.cuda.launch import Protocol, kernels_reduce
from device_comm.reduce_op import reduce_in_rank_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.cuda.launch import Launch
    from device_comm.cuda.planner import Planner
    from device_comm.reduce_op import ReduceOp
    from device_comm.work import Pending

    Plan = Callable[[Planner, int], list[Launch]]
    """Makes launches with a planner and the address of a table, or 0."""


class IpcVerbs(DeviceCommunicator):
    """The primitives of `device_comm.cuda.ipc_comm.IpcComm`, which says how launches are issued."""

    def _issue(self, call: Call, plan: Plan, direct: Tensor | None = None) -> Pending | None:
        """Launch what ``plan`` makes, on the current stream.

        Args:
            call: the operation.
            plan: see `Plan`.
            direct: what peers may read where it lies, if there is a table.
        """
        raise NotImplementedError

    def _transfer(
        self, direction: str, peer: int, plan: Plan, keep: Tensor, call: Call
    ) -> Pending | None:
        """Launch what ``plan`` makes, beside the current stream; ``keep`` is what it uses."""
        raise NotImplementedError

    def _arrival(self, call: Call) -> Pending | None:
        """What was issued until now, for the host to wait for; None in a capture."""
        raise NotImplementedError

    def _protocol(self, size: int) -> Protocol:
        """How an all-reduce of ``size`` bytes is done."""
        raise NotImplementedError

    # --- collectives ---------------------------------------------------------------------

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        if not kernels_reduce(op, source.dtype):
            parts = source.new_empty((self.world_size, *source.shape))
            self._all_gather(parts, source, call)
            reduce_in_rank_order(parts.unbind(), op, output)
            return None
        return self._all_reduce_by(self._protocol(source.nbytes), output, source, op, call)

    def _all_reduce_by(
        self, protocol: Protocol, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        """As `_all_reduce`, for reductions that have kernels; packets take a limited size."""
        in_place = output.data_ptr() == source.data_ptr()
        from_table = protocol is Protocol.TWO_SHOT or (
            protocol is Protocol.ONE_SHOT and not in_place
        )
        return self._issue(
            call,
            lambda plan, table: plan.all_reduce(
                output.data_ptr(),
                source.data_ptr(),
                source.nbytes,
                source.dtype,
                op,
                protocol=protocol,
                table=table,
            ),
            source if from_table else None,
        )

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        sizes = [source.nbytes] * self.world_size
        return self._issue(
            call,
            lambda plan, table: plan.all_gather(
                output.data_ptr(), source.data_ptr(), sizes, table=table
            ),
            source,
        )

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        lengths = _in_bytes(sizes, source)
        return self._issue(
            call, lambda plan, _: plan.all_gather(output.data_ptr(), source.data_ptr(), lengths)
        )

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        sizes = [output.numel()] * self.world_size
        return self._reduce_scatterv(output, source, sizes, op, call)

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        if not kernels_reduce(op, source.dtype):
            parts = source.new_empty((self.world_size, output.numel()))
            mine = [output.numel()] * self.world_size
            self._all_to_all(parts, source, mine, sizes, call)
            if output.numel():
                reduce_in_rank_order(parts.unbind(), op, output.view(-1))
            return None
        lengths = _in_bytes(sizes, source)
        return self._issue(
            call,
            lambda plan, table: plan.reduce_scatter(
                output.data_ptr(), source.data_ptr(), lengths, source.dtype, op, table=table
            ),
            source,
        )

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        takes, gives = _in_bytes(output_sizes, source), _in_bytes(source_sizes, source)
        return self._issue(
            call,
            lambda plan, _: plan.all_to_all(output.data_ptr(), source.data_ptr(), takes, gives),
        )

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        return self._issue(
            call, lambda plan, _: plan.broadcast(buffer.data_ptr(), buffer.nbytes, root)
        )

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        if not kernels_reduce(op, source.dtype):
            parts = None if output is None else source.new_empty((self.world_size, *source.shape))
            self._gather(parts, source, root, call)
            if parts is not None and output is not None:
                reduce_in_rank_order(parts.unbind(), op, output)
            return None
        return self._issue(
            call,
            lambda plan, _: plan.reduce(
                _address(output), source.data_ptr(), source.nbytes, source.dtype, op, root
            ),
        )

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        return self._issue(
            call,
            lambda plan, _: plan.gather(_address(output), source.data_ptr(), source.nbytes, root),
        )

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        return self._issue(
            call,
            lambda plan, _: plan.scatter(output.data_ptr(), _address(source), output.nbytes, root),
        )

    def _barrier(self, call: Call) -> Pending | None:
        self._issue(call, lambda plan, _: plan.barrier())
        return self._arrival(call)

    # --- messages ------------------------------------------------------------------------

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        return self._transfer(
            "send",
            peer,
            lambda plan, _: plan.send(source.data_ptr(), source.nbytes, peer),
            source,
            call,
        )

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        return self._transfer(
            "recv",
            peer,
            lambda plan, _: plan.recv(output.data_ptr(), output.nbytes, peer),
            output,
            call,
        )


def _in_bytes(sizes: Sequence[int], like: Tensor) -> list[int]:
    return [size * like.element_size() for size in sizes]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


__all__ = ["IpcVerbs"]
