"""Several backends as one: each operation goes to the one that is chosen for it.

The choice depends on the verb and on the bytes of the whole tensor, which all ranks know alike;
`device_comm.select` says how. Where the ranks' sizes may differ, as in an all-to-all, one
backend does all sizes.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from device_comm.base import Capabilities, DeviceCommunicator
from device_comm.choice import Explanation
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from device_comm.base import Call
    from device_comm.reduce_op import ReduceOp
    from device_comm.select import Selection
    from device_comm.work import Pending


class SelectingComm(DeviceCommunicator):
    """One rank's end of a group with several backends, which are closed with it.

    Results may differ in their last bits between backends, so between sizes; for one size they
    are the same on all ranks.
    """

    def __init__(self, selection: Selection) -> None:
        """Choose by ``selection``, the same on all ranks. Collective: no.

        Args:
            selection: at least one candidate is not refused; all are of the same ranks, in the
                same order, on one device and over one board.
        """
        comms = [each.comm for each in selection.candidates if each.comm is not None]
        self._comms = list(dict.fromkeys(comms))
        if not self._comms:
            raise ValueError("a selection needs a candidate that was not refused")
        first = self._comms[0]
        for each in self._comms[1:]:
            if (each.rank, each.world_size, each.device, each.members) != (
                first.rank,
                first.world_size,
                first.device,
                first.members,
            ):
                raise ValueError(f"{each} and {first} are not of one group")
        each_has = [comm.capabilities for comm in self._comms]
        super().__init__(
            rank=first.rank,
            world_size=first.world_size,
            device=first.device,
            capabilities=Capabilities(
                "+".join(dict.fromkeys(has.backend for has in each_has)),
                verbs=selection.verbs,
                identical=all(has.identical for has in each_has),
                stream_ordered=all(has.stream_ordered for has in each_has),
                detects_divergence=all(has.detects_divergence for has in each_has),
                detects_loss=all(has.detects_loss for has in each_has),
                sends_ahead=all(has.sends_ahead for has in each_has),
            ),
            name=first.name,
            timeout=first.timeout,
            watch=first.watch,
            members=first.members,
        )
        self.selection = selection

    def explain(self) -> Explanation:
        """What does each verb and size, and why; also what was refused. Collective: no."""
        refused = [
            (each.name, each.refused) for each in self.selection.candidates if each.comm is None
        ]
        for comm in self._comms:
            refused += comm.explain().refused
        return Explanation(self.name, tuple(self.selection.choices()), tuple(refused))

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Capture graphs in this context, with all backends. Collective: yes, every member."""
        with ExitStack() as captures:
            for comm in self._comms:
                captures.enter_context(comm.graph_capture())
            yield

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once all backends have nothing under way. Collective: no."""
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        for comm in self._comms:
            comm.flush(deadline)

    def _discard(self) -> None:
        for comm in self._comms:
            comm._discard()

    def _close(self) -> None:
        with ExitStack() as closing:
            for comm in self._comms:
                closing.callback(comm.close)

    # --- verbs ---------------------------------------------------------------------------

    def _for(
        self, call: Call, size: int = 0, reduction: tuple[ReduceOp, torch.dtype] | None = None
    ) -> DeviceCommunicator:
        """Who does this operation on a tensor of ``size`` bytes."""
        if reduction is None:
            chosen = self.selection.candidate(call.verb, size)
        else:
            chosen = self.selection.reducer(call.verb, size, *reduction)
        if chosen.comm is None:
            raise NotImplementedError(f"{call.operation}: {chosen.name} was refused")
        return chosen.comm

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        comm = self._for(call, source.nbytes, (op, source.dtype))
        return comm._launch(lambda same: comm._all_reduce(output, source, op, same), call)

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        comm = self._for(call, output.nbytes)
        return comm._launch(lambda same: comm._all_gather(output, source, same), call)

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        comm = self._for(call, output.nbytes)
        return comm._launch(lambda same: comm._all_gatherv(output, source, sizes, same), call)

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        comm = self._for(call, source.nbytes, (op, source.dtype))
        return comm._launch(lambda same: comm._reduce_scatter(output, source, op, same), call)

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        comm = self._for(call, source.nbytes, (op, source.dtype))
        return comm._launch(
            lambda same: comm._reduce_scatterv(output, source, sizes, op, same), call
        )

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        comm = self._for(call)
        return comm._launch(
            lambda same: comm._all_to_all(output, source, output_sizes, source_sizes, same), call
        )

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        comm = self._for(call, buffer.nbytes)
        return comm._launch(lambda same: comm._broadcast(buffer, root, same), call)

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        comm = self._for(call, source.nbytes, (op, source.dtype))
        return comm._launch(lambda same: comm._reduce(output, source, root, op, same), call)

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        comm = self._for(call, source.nbytes * self.world_size)
        return comm._launch(lambda same: comm._gather(output, source, root, same), call)

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        comm = self._for(call, output.nbytes * self.world_size)
        return comm._launch(lambda same: comm._scatter(output, source, root, same), call)

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        comm = self._for(call, source.nbytes)
        return comm._launch(lambda same: comm._send(source, peer, same), call)

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        comm = self._for(call, output.nbytes)
        return comm._launch(lambda same: comm._recv(output, peer, same), call)

    def _barrier(self, call: Call) -> Pending | None:
        comm = self._for(call)
        return comm._launch(comm._barrier, call)
