"""Choosing among backends that could all do the work: pure logic, without communication.

There are candidates, in order of preference, some of them refused with a reason. A table says
how long each took for some sizes of each verb on this machine; the quickest is chosen. A size
between two measured ones belongs to the nearer, on a logarithmic scale. What was not measured
goes to the first candidate that can do it.

All ranks of a group must hold the same candidates and the same table.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from device_comm.choice import Choice, in_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from device_comm.base import DeviceCommunicator
    from device_comm.reduce_op import ReduceOp

MEASURED_AS: Final = {
    "all_gatherv": "all_gather",
    "reduce_scatterv": "reduce_scatter",
    "recv": "send",
}
"""Verbs that are looked up in the table under another one's name."""

SIZELESS: Final = frozenset({"all_to_all", "barrier"})
"""Verbs of which a rank does not know the others' sizes: one candidate for all sizes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to carry out verbs.

    Attributes:
        name: as tables and explanations call it.
        comm: the communicator; None if it was refused.
        refused: why it was.
        up_to: the bytes of a tensor that it takes; None: any.
    """

    name: str
    comm: DeviceCommunicator | None
    refused: str = ""
    up_to: int | None = None

    def objection(self, verb: str, size: int) -> str:
        """Why it cannot do ``verb`` on a tensor of ``size`` bytes; ``""`` if it can."""
        if self.comm is None:
            return self.refused
        if verb not in self.comm.capabilities.verbs:
            return f"has no {verb}"
        if self.up_to is not None and size > self.up_to:
            return f"takes up to {in_bytes(self.up_to)}"
        return ""


class Measured(msgspec.Struct, frozen=True):
    """How long one verb takes on tensors of one size.

    Attributes:
        size: bytes of the whole tensor.
        seconds: of each candidate, by name.
    """

    size: int
    seconds: dict[str, float]


class Table(msgspec.Struct, frozen=True):
    """What was measured on a machine.

    Attributes:
        key: the machine and the group, as `device_comm.select_cache.Key` says it.
        verbs: by verb, in the order of sizes.
    """

    key: dict[str, str]
    verbs: dict[str, list[Measured]]

    def sound(self) -> bool:
        """Whether sizes ascend, and times are times."""
        return all(_sound(rows) for rows in self.verbs.values())


class Selection:
    """Who does what. The same on all ranks."""

    def __init__(self, candidates: Sequence[Candidate], table: Table | None = None) -> None:
        """Choose among ``candidates`` by ``table``; None: by their order alone."""
        self.candidates = tuple(candidates)
        self.table = table
        offered = [each.comm.capabilities.verbs for each in candidates if each.comm is not None]
        self.verbs = frozenset[str]().union(*offered)
        self._ranges = {verb: self._divide(verb) for verb in self.verbs}
        self._limits = {
            verb: [limit for limit, _, _ in ranges[:-1]] for verb, ranges in self._ranges.items()
        }
        general = [each for each in candidates if not _is_special(each)]
        self._general = self if len(general) == len(candidates) else Selection(general, table)

    def candidate(self, verb: str, size: int) -> Candidate:
        """Who does ``verb``, which some candidate offers, on a tensor of ``size`` bytes."""
        ranges = self._ranges[verb]
        return ranges[bisect_left(self._limits[verb], size)][1]

    def reducer(self, verb: str, size: int, op: ReduceOp, dtype: torch.dtype) -> Candidate:
        """As `candidate`, for a reduction, which not every candidate has for all dtypes."""
        chosen = self.candidate(verb, size)
        if chosen.comm is None or chosen.comm.capabilities.reduces(op, dtype):
            return chosen
        return self._general.candidate(verb, size)

    def choices(self) -> list[Choice]:
        """Every verb and size, with who does it and why the others do not."""
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
        """The others, with reasons; those that were refused altogether are not repeated here."""
        others = [each for each in self.candidates if each is not chosen and each.comm is not None]
        return tuple((each.name, each.objection(verb, size) or "slower") for each in others)

    def _divide(self, verb: str) -> list[tuple[float, Candidate, str]]:
        """(up to so many bytes, who, why), neighbours that are the same joined."""
        rows = self._rows(verb)
        if verb in SIZELESS:
            return [(math.inf, *self._choose(verb, rows, sys.maxsize))]
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
        """The sizes above which some candidate cannot do ``verb``."""
        return [
            each.up_to
            for each in self.candidates
            if each.up_to is not None and not each.objection(verb, 0)
        ]

    def _choose(self, verb: str, rows: Sequence[Measured], size: int) -> tuple[Candidate, str]:
        """The quickest, all ``rows`` counting the same, of those that can do it."""
        able = [each for each in self.candidates if not each.objection(verb, size)]
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


def _is_special(candidate: Candidate) -> bool:
    return candidate.comm is not None and candidate.comm.capabilities.reductions is not None


def _sound(rows: Sequence[Measured]) -> bool:
    sizes = [row.size for row in rows]
    times = [seconds for row in rows for seconds in row.seconds.values()]
    return (
        bool(times)
        and sizes == sorted(set(sizes))
        and min(sizes) >= 0
        and all(math.isfinite(seconds) and seconds > 0 for seconds in times)
    )
