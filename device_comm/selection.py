"""Choose a backend for each operation by measured times.

Candidates are in order of preference; some are refused, with a reason. A table has the time that
each took on this machine, for some sizes of each verb; the fastest is chosen. A size that was not
measured is treated as the nearest one that was, on a logarithmic scale. A verb that was not
measured goes to the first candidate that offers it.

All ranks of a group must have the same candidates and the same table.

The choice depends only on the verb and the bytes of the whole tensor, which are the same on all
ranks, so all ranks choose the same; see `device_comm.selection`. For an all-to-all, where
the ranks' sizes may differ, one backend is chosen for all sizes. In the capture of a CUDA graph the
choice is among the backends that can be captured: all ranks have to capture the same operations.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from torch import Tensor

from device_comm.backend import Backend, Capabilities, Choice, Explanation, in_bytes
from device_comm.operation import REDUCTIONS, Operation, ReduceOp, Verb
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from device_comm.work import Pending


MEASURED_AS: Final = {
    "all_gatherv": "all_gather",
    "reduce_scatterv": "reduce_scatter",
    "recv": "send",
}
"""Verbs that are not measured themselves, with the verb whose times are used for them."""

SIZELESS: Final = frozenset({"all_to_all", "barrier"})
"""Verbs for which a rank does not know the others' sizes: one candidate is used for all sizes."""


def size_of(operation: Operation, world_size: int) -> int:
    """The size on which the choice depends: the bytes of the whole tensor, equal on all ranks.

    0 for verbs in `SIZELESS`.
    """
    verb = operation.verb
    if verb in SIZELESS:
        return 0
    if verb == "gather":
        return operation.source.nbytes * world_size
    if verb == "scatter":
        return operation.output.nbytes * world_size
    if verb == "broadcast":
        return operation.buffer.nbytes
    takes_all = verb in ("all_gather", "all_gatherv", "recv")
    return operation.output.nbytes if takes_all else operation.source.nbytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may be chosen.

    Attributes:
        name: its name in tables and explanations.
        backend: the backend; None if it was refused.
        unavailable: why it was refused.
        up_to: the largest tensor that it takes, in bytes; None: no limit.
    """

    name: str
    backend: Backend | None
    unavailable: str = ""
    up_to: int | None = None

    def why_unavailable(self, verb: str, size: int) -> str:
        """Why it cannot carry out ``verb`` on a tensor of ``size`` bytes; ``""`` if it can."""
        if self.backend is None:
            return self.unavailable
        if verb not in self.backend.capabilities.verbs:
            return f"has no {verb}"
        if self.up_to is not None and size > self.up_to:
            return f"takes up to {in_bytes(self.up_to)}"
        return ""


class Measured(msgspec.Struct, frozen=True):
    """The times of one verb for one size.

    Attributes:
        size: bytes of the whole tensor.
        seconds: the time of each candidate, by its name.
    """

    size: int
    seconds: dict[str, float]


class Table(msgspec.Struct, frozen=True):
    """The times measured on a machine.

    Attributes:
        key: the machine and the group; see `device_comm.measuring.Key`.
        verbs: the measurements of each verb, in ascending order of sizes.
    """

    key: dict[str, str]
    verbs: dict[str, list[Measured]]

    def sound(self) -> bool:
        """Whether sizes ascend, and times are positive and finite."""
        return all(_sound(rows) for rows in self.verbs.values())


class Selection:
    """Which candidate carries out which verb and size. The same on all ranks.

    Attributes:
        candidates: in order of preference.
        table: the times that decide; None: the order does.
        verbs: those that a candidate offers.
        captured: what is chosen in the capture of a CUDA graph: among the candidates that queue
            their work on the current stream. This selection itself, if that are all or none.
    """

    def __init__(self, candidates: Sequence[Candidate], table: Table | None = None) -> None:
        """Choose among ``candidates`` by ``table``; None: the first that offers the verb."""
        self.candidates = tuple(candidates)
        self.table = table
        has = {each: each.backend.capabilities for each in candidates if each.backend}
        self.verbs = frozenset[Verb]().union(*(offered.verbs for offered in has.values()))
        self._ranges: dict[str, list[tuple[float, Candidate, str]]] = {
            verb: self._divide(verb) for verb in self.verbs
        }
        self._limits: dict[str, list[float]] = {
            verb: [limit for limit, _, _ in ranges[:-1]] for verb, ranges in self._ranges.items()
        }
        general = [each for each in candidates if each not in has or has[each].reductions is None]
        self._general = self if len(general) == len(candidates) else Selection(general, table)
        queueing = [each for each in candidates if each not in has or has[each].stream_ordered]
        mixed = len(queueing) < len(candidates) and any(each.backend for each in queueing)
        self.captured = Selection(queueing, table) if mixed else self

    def candidate(self, verb: str, size: int) -> Candidate:
        """The candidate for ``verb`` on a tensor of ``size`` bytes; one of them must offer it."""
        ranges = self._ranges[verb]
        return ranges[bisect_left(self._limits[verb], size)][1]

    def reducer(self, verb: str, size: int, op: ReduceOp, dtype: torch.dtype) -> Candidate:
        """As `candidate`, for a reduction. If the chosen one does not support ``op`` on ``dtype``,
        one of the candidates that support all reductions.
        """
        chosen = self.candidate(verb, size)
        if chosen.backend is None or chosen.backend.capabilities.reduces(op, dtype):
            return chosen
        return self._general.candidate(verb, size)

    def chosen(self, verb: str) -> list[Candidate]:
        """The candidates that carry out ``verb`` for some size, also in a capture."""
        found = [chosen for _, chosen, _ in self._ranges.get(verb, ())]
        if self.captured is not self:
            found += self.captured.chosen(verb)
        return list(dict.fromkeys(found))

    def choices(self) -> list[Choice]:
        """For every verb and range of sizes the chosen candidate, and why not the others."""
        found = []
        for verb in sorted(self._ranges):
            above = -1
            for limit, chosen, reason in self._ranges[verb]:
                up_to = None if limit == math.inf else int(limit)
                refused = self._refused(verb, above + 1, chosen)
                found.append(Choice(verb, above, up_to, chosen.name, reason, refused))
                above = -1 if up_to is None else up_to
        return found

    def _refused(self, verb: str, size: int, chosen: Candidate) -> tuple[tuple[str, str], ...]:
        """The other candidates, with the reason; without those that have no backend at all, and
        those that are for one other verb alone.
        """
        others = [
            each
            for each in self.candidates
            if each is not chosen
            and each.backend is not None
            and (verb in (has := each.backend.capabilities.verbs) or len(has) > 1)
        ]
        return tuple((each.name, each.why_unavailable(verb, size) or "slower") for each in others)

    def _divide(self, verb: str) -> list[tuple[float, Candidate, str]]:
        """The ranges of sizes of a verb: (largest size in bytes, candidate, reason), ascending.

        Neighbouring ranges with the same candidate are merged.
        """
        rows = self._rows(verb)
        if verb in SIZELESS:
            return [(math.inf, *self._choose(verb, rows, sys.maxsize))]
        # Halfway between two measured sizes on a logarithmic scale.
        cuts = [math.sqrt(max(a.size, 1) * b.size) for a, b in pairwise(rows)]
        ranges: list[tuple[float, Candidate, str]] = []
        low = 0
        for limit in [*sorted({*map(math.floor, cuts), *self._ends(verb)}), math.inf]:
            near = rows[bisect_left(cuts, low) :][:1]
            chosen, reason = self._choose(verb, near, low)
            if ranges and ranges[-1][1] is chosen:
                reason = ranges.pop()[2]
            ranges.append((limit, chosen, reason))
            low = int(limit) + 1 if limit != math.inf else low
        return ranges

    def _ends(self, verb: str) -> list[int]:
        """The sizes up to which candidates with a limit offer ``verb``."""
        return [
            each.up_to
            for each in self.candidates
            if each.up_to is not None and not each.why_unavailable(verb, 0)
        ]

    def _choose(self, verb: str, rows: Sequence[Measured], size: int) -> tuple[Candidate, str]:
        """The fastest candidate that can carry out ``verb``, and the reason for the choice.

        With several ``rows`` the geometric mean of the times counts.
        """
        able = [each for each in self.candidates if not each.why_unavailable(verb, size)]
        timed = [each for each in able if all(each.name in row.seconds for row in rows)]
        if not rows or not timed:
            return able[0], "the only one" if len(able) == 1 else "the first; not measured"
        best = min(timed, key=lambda each: sum(math.log(row.seconds[each.name]) for row in rows))
        if len(rows) > 1:
            return best, "the quickest over all sizes"
        took = rows[0].seconds[best.name] * 1e6
        return best, f"{took:.1f} us at {in_bytes(rows[0].size)}"

    def _rows(self, verb: str) -> Sequence[Measured]:
        if self.table is None:
            return ()
        return self.table.verbs.get(MEASURED_AS.get(verb, verb), ())


def _sound(rows: Sequence[Measured]) -> bool:
    sizes = [row.size for row in rows]
    times = [seconds for row in rows for seconds in row.seconds.values()]
    return (
        bool(times)
        and sizes == sorted(set(sizes))
        and min(sizes) >= 0
        and all(math.isfinite(seconds) and seconds > 0 for seconds in times)
    )


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
            eager_sends=all(each.eager_sends for each in has),
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
            (each.name, each.unavailable)
            for each in self.selection.candidates
            if each.backend is None
        ]
        for backend in self._backends:
            refused += backend.explain().unavailable
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

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """As the backend that is chosen for a send of ``size`` bytes."""
        return self._chosen("send", size).sends_eagerly(peer, size)

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
