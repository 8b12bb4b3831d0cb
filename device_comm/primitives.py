"""What a backend writes: the primitives under the verbs.

A backend subclasses `device_comm.base.DeviceCommunicator` and overrides the primitives it
has (those named in its ``capabilities.verbs``); nothing else needs to be written.

Guarantees to a primitive
    - There are two ranks or more; a single rank never gets this far.
    - Every tensor is contiguous, on ``self.device``, without autograd history or lazy
      conjugation. Its shape means nothing, the order of its elements does; sizes are in
      elements. Arguments are valid. Reductions are defined for the dtype. No collective of
      equal sizes is empty; single entries of ``sizes`` may be 0.
    - An output shares no memory with an input, except where "in place" is said.
    - The group was neither closed nor aborted, and the watch has been stamped.

What a primitive owes
    - It returns None if it is done (in stream order, where ``capabilities.stream_ordered``),
      or a `Pending`. With ``call.background`` set the caller does not wait: return a
      `Pending` soon, if you can.
    - Once done, the output holds the result and the caller may overwrite the input.
    - It waits by ``self.watch.wait(...)`` or the like: until ``call.deadline``, and honours
      aborts and lost peers. It raises this project's errors only.
    - Primitives of one communicator are matched across ranks in the order they are called;
      ``send`` and ``recv`` only per pair of ranks and direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from device_comm.reduce_op import ReduceOp
    from device_comm.work import Pending

ALL_VERBS = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gatherv",
        "reduce_scatter",
        "reduce_scatterv",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    }
)


@dataclass(frozen=True)
class Capabilities:
    """What a communicator can do, as data.

    Attributes:
        backend: its name: ``"gloo"``, ``"shm"``, ``"loopback"``, ...
        verbs: the verbs it offers; the others raise `NotImplementedError`.
        identical: reductions are bitwise identical on all ranks.
        stream_ordered: a call returns once the work is on the current CUDA stream; False:
            once the result is there.
        detects_divergence: ranks that issue different operations get `DivergenceError`.
        detects_loss: a peer whose process ends is noticed before the deadline.
        sends_ahead: a send needs no receive: it takes a copy, within a limit.
        reductions: the pairs of operation and dtype that it reduces; the others raise
            `NotImplementedError`. None: all that `check_reduction` accepts.
    """

    backend: str
    verbs: frozenset[str] = ALL_VERBS
    identical: bool = True
    stream_ordered: bool = False
    detects_divergence: bool = False
    detects_loss: bool = False
    sends_ahead: bool = False
    overlaps: bool = True
    reductions: frozenset[tuple[ReduceOp, torch.dtype]] | None = None

    def reduces(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether it reduces tensors of ``dtype`` by ``op``, which `check_reduction` accepts."""
        return self.reductions is None or (op, dtype) in self.reductions


class Call:
    """One operation, as a primitive sees it.

    Attributes:
        verb: one of `ALL_VERBS`.
        operation: the verb with the communicator's name, for stamps and errors.
        background: ``async_op=True``: the caller goes on without waiting.
    """

    __slots__ = ("_timeout", "background", "operation", "verb")

    def __init__(
        self, verb: str, operation: str, timeout: float | Deadline | None, background: bool
    ) -> None:
        """Describe an operation; ``timeout`` is in seconds, or the deadline itself."""
        self.verb = verb
        self.operation = operation
        self.background = background
        self._timeout = timeout

    @property
    def deadline(self) -> Deadline:
        """When to give up. Made when first asked for: what is done at once needs no clock."""
        if not isinstance(self._timeout, Deadline):
            self._timeout = Deadline.after(self._timeout)
        return self._timeout


class Primitives:
    """The operations that a backend provides, for the verbs it has."""

    def _all_reduce(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        """Backend: reduce ``source`` of all ranks into ``output``; in place if they are one."""
        raise NotImplementedError

    def _all_gather(self, output: Tensor, source: Tensor, call: Call) -> Pending | None:
        """Backend: put the ``source`` of all ranks, in rank order, into ``output``."""
        raise NotImplementedError

    def _all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        """Backend: as `_all_gather`; rank r's ``source`` has ``sizes[r]`` elements."""
        raise NotImplementedError

    def _reduce_scatter(
        self, output: Tensor, source: Tensor, op: ReduceOp, call: Call
    ) -> Pending | None:
        """Backend: reduce this rank's part of all ``source``, which are N equal parts."""
        raise NotImplementedError

    def _reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp, call: Call
    ) -> Pending | None:
        """Backend: as `_reduce_scatter`; rank r's part has ``sizes[r]`` elements."""
        raise NotImplementedError

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        call: Call,
    ) -> Pending | None:
        """Backend: send part r of ``source`` to rank r, put what r sends in part r of ``output``.

        ``source_sizes[r]`` and ``output_sizes[r]`` are elements. A rank's tensors may be
        empty here.
        """
        raise NotImplementedError

    def _all_to_all_equal(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], call: Call
    ) -> Pending | None:
        """Backend, if it gains from knowing: as `_all_to_all`; all of ``sizes`` are the same."""
        return self._all_to_all(output, source, sizes, sizes, call)

    def _broadcast(self, buffer: Tensor, root: int, call: Call) -> Pending | None:
        """Backend: fill ``buffer`` with the root's, in place."""
        raise NotImplementedError

    def _reduce(
        self, output: Tensor | None, source: Tensor, root: int, op: ReduceOp, call: Call
    ) -> Pending | None:
        """Backend: reduce into the root's ``output``, None elsewhere; in place if they are one."""
        raise NotImplementedError

    def _gather(
        self, output: Tensor | None, source: Tensor, root: int, call: Call
    ) -> Pending | None:
        """Backend: as `_all_gather`, into the root's ``output``, None elsewhere."""
        raise NotImplementedError

    def _scatter(
        self, output: Tensor, source: Tensor | None, root: int, call: Call
    ) -> Pending | None:
        """Backend: fill ``output`` with this rank's of N equal parts of the root's ``source``."""
        raise NotImplementedError

    def _send(self, source: Tensor, peer: int, call: Call) -> Pending | None:
        """Backend: send to rank ``peer``. With ``call.background``, needs no matching recv."""
        raise NotImplementedError

    def _recv(self, output: Tensor, peer: int, call: Call) -> Pending | None:
        """Backend: fill ``output`` with what rank ``peer`` sends next."""
        raise NotImplementedError

    def _barrier(self, call: Call) -> Pending | None:
        """Backend: be done once every rank has come."""
        raise NotImplementedError
