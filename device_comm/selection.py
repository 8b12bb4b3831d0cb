"""Choose a backend for each operation by measured times.

Candidates are in order of preference; a rejected one has a reason. A table has each candidate's
time on this machine, for some sizes of each verb; the fastest is chosen. Other sizes use the times
of the nearest measured size, on a logarithmic scale. A verb without times uses the first candidate
that offers it.

All ranks of a group must have the same candidates and the same table. The choice depends only on
the verb and the bytes of the whole tensor, so all ranks choose the same. The verbs in `SIZELESS`
use one backend for all sizes. In a CUDA graph capture only the backends that support captures are
candidates.
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
"""Verbs that use the times of another verb."""

SIZELESS: Final = frozenset({"all_to_all", "barrier"})
"""Verbs whose sizes may differ between ranks: one candidate is used for all sizes."""


def size_of(operation: Operation, world_size: int) -> int:
    """Return the bytes of the whole tensor, equal on all ranks; 0 for verbs in `SIZELESS`."""
    verb = operation.verb
    if verb in SIZELESS:
        return 0
    if verb == "gather":
        return operation.source.nbytes * world_size
    if verb == "scatter":
        return operation.output.nbytes * world_size
    if verb == "broadcast":
        return operation.buffer.nbytes
    has_whole_output = verb in ("all_gather", "all_gatherv", "recv")
    return operation.output.nbytes if has_whole_output else operation.source.nbytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to choose from, for tensors of at most ``up_to`` bytes; None: no limit.

    ``backend`` is None if it was rejected, because of ``unavailable``.
    """

    name: str
    backend: Backend | None
    unavailable: str = ""
    up_to: int | None = None

    def why_unavailable(self, verb: str, size: int) -> str:
        """Return why it cannot run ``verb`` on ``size`` bytes; ``""`` if it can."""
        if self.backend is None:
            return self.unavailable
        if verb not in self.backend.capabilities.verbs:
            return f"has no {verb}"
        if self.up_to is not None and size > self.up_to:
            return f"takes up to {in_bytes(self.up_to)}"
        return ""


class Measured(msgspec.Struct, frozen=True):
    """The seconds of one verb on ``size`` bytes of the whole tensor, by candidate name."""

    size: int
    seconds: dict[str, float]


class Table(msgspec.Struct, frozen=True):
    """The measured times of a machine and group, by verb and ascending size.

    ``key`` is from `device_comm.measuring.Key`.
    """

    key: dict[str, str]
    verbs: dict[str, list[Measured]]

    def sound(self) -> bool:
        """Return True if sizes ascend, and times are positive and finite."""
        return all(_sound(rows) for rows in self.verbs.values())


class Selection:
    """The candidate for each verb and size; the same on all ranks.

    Without a table the first candidate that offers a verb is chosen. ``verbs`` are the verbs of all
    candidates together. ``captured`` is the selection in graph captures, among stream-ordered
    candidates; itself if all or none are.
    """

    def __init__(self, candidates: Sequence[Candidate], table: Table | None = None) -> None:
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
        """Return the candidate for ``verb`` on ``size`` bytes; at least one must offer it."""
        ranges = self._ranges[verb]
        return ranges[bisect_left(self._limits[verb], size)][1]

    def reducer(self, verb: str, size: int, op: ReduceOp, dtype: torch.dtype) -> Candidate:
        """Return the candidate for a reduction of ``size`` bytes.

        If the fastest does not support ``op`` on ``dtype``, the fastest that supports all
        reductions.
        """
        chosen = self.candidate(verb, size)
        if chosen.backend is None or chosen.backend.capabilities.reduces(op, dtype):
            return chosen
        return self._general.candidate(verb, size)

    def chosen(self, verb: str) -> list[Candidate]:
        """Return the candidates that run ``verb`` for some size, captures included."""
        candidates = [chosen for _, chosen, _ in self._ranges.get(verb, ())]
        if self.captured is not self:
            candidates += self.captured.chosen(verb)
        return list(dict.fromkeys(candidates))

    def choices(self) -> list[Choice]:
        """Return the choices for every verb and range of sizes."""
        result = []
        for verb in sorted(self._ranges):
            above = -1
            for limit, chosen, reason in self._ranges[verb]:
                up_to = None if limit == math.inf else int(limit)
                refused = self._refused(verb, above + 1, chosen)
                result.append(Choice(verb, above, up_to, chosen.name, reason, refused))
                above = -1 if up_to is None else up_to
        return result

    def _refused(self, verb: str, size: int, chosen: Candidate) -> tuple[tuple[str, str], ...]:
        """Return the other candidates with reasons.

        Omits candidates without a backend, and those for a single other verb.
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
        """Return a verb's ranges as (largest size in bytes, candidate, reason), ascending.

        Adjacent ranges with the same candidate are merged.
        """
        rows = self._rows(verb)
        if verb in SIZELESS:
            return [(math.inf, *self._choose(verb, rows, sys.maxsize))]
        # The geometric mean of two measured sizes.
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
        """Return the size limits of the candidates that offer ``verb``."""
        return [
            each.up_to
            for each in self.candidates
            if each.up_to is not None and not each.why_unavailable(verb, 0)
        ]

    def _choose(self, verb: str, rows: Sequence[Measured], size: int) -> tuple[Candidate, str]:
        """Return (the fastest candidate for ``verb``, the reason)."""
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

    All ranks use the same backend for one size. Reductions of different sizes may differ in the
    last bits.
    """

    def __init__(
        self,
        selection: Selection,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        """Choose by ``selection``, the same on all ranks.

        All its backends have the same ranks in the same order, device and board. ``capturing``
        returns True while the current stream is captured. Raises `ValueError` if every candidate
        was rejected, or the backends are of different groups.
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
        """Return the backend that runs each verb, by size, and why."""
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
        """Return a capture context of all backends. Collective: yes, every member."""
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
        """Ask the backend that is chosen for the sum of ``x``.

        Only plain sums are measured. So near a crossover of two backends the choice may ignore the
        time that a fused norm saves.
        """
        chosen = self._chosen("all_reduce", x.nbytes, (ReduceOp.SUM, x.dtype))
        return chosen.norms(x, weight)

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """Ask the backend that is chosen for a send of ``size`` bytes."""
        return self._chosen("send", size).sends_eagerly(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Make the tensor with the first backend; all are on the same device."""
        return self._backends[0].empty(shape, dtype, like)

    def discard(self) -> None:
        """Discard all backends."""
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
