"""Hypothesis strategies for programs, and for what befalls one rank in the middle of one."""

from __future__ import annotations

import math
import os
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from tests.device_comm.oracle import MOVED, REDUCED, ops_for
from tests.fuzz.program import LAYOUTS, Program, Step, groups_of
from tests.fuzz.verbs import (
    MESSAGES,
    OBJECT_VERBS,
    REDUCTIONS,
    TENSOR_VERBS,
    WITH_FORMS,
    WITHOUT_DIM,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]


MOST_STEPS = 14
MOST_ELEMENTS = 80_000
"""Of one rank's input: above the slots of shared memory, and the pipes of messages."""

_LENGTHS = st.one_of(st.integers(0, 4), st.sampled_from([31, 257, 4099, 33_000, 70_001]))
_SIZES = st.integers(0, 5)
VERBS = (*TENSOR_VERBS, "dispatch", *OBJECT_VERBS, *MESSAGES, "barrier")


def forms_of(verb: str) -> Sequence[str]:
    return WITH_FORMS.get(verb, ("plain", "async"))


@st.composite
def programs(draw: Draw, n: int) -> Program:
    return Program(n, tuple(draw(st.lists(steps(n), min_size=1, max_size=MOST_STEPS))))


@st.composite
def steps(draw: Draw, n: int) -> Step:
    group = draw(st.sampled_from(sorted(groups_of(n))))
    # A step is for one of the groups of a kind; ranks are taken from the smallest of them.
    size = min(map(len, groups_of(n)[group]))
    most = max(map(len, groups_of(n)[group]))
    verb = draw(st.sampled_from(VERBS))
    reduces = verb in REDUCTIONS
    dtype = draw(st.sampled_from(REDUCED if reduces else MOVED))
    least = 0 if verb in WITHOUT_DIM or verb in MESSAGES else 1
    shape = tuple(draw(st.lists(_LENGTHS, min_size=least, max_size=3)))
    # A length of 0 hides the others only until the verb puts its sizes there.
    if math.prod(length or 1 for length in shape) > MOST_ELEMENTS:
        shape = (min(shape[0], 5), *(min(length, 31) for length in shape[1:]))
    form = draw(st.sampled_from(forms_of(verb)))
    step = {
        "verb": verb,
        "group": group,
        "dtype": dtype,
        "shape": shape,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "form": form,
        "op": draw(st.sampled_from(ops_for(dtype))) if reduces else Step.op,
        "root": draw(st.integers(0, size - 1)),
        "peer": draw(st.integers(0, size - 1)),
        "dim": draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0,
    }
    if verb in ("all_gatherv", "reduce_scatterv", "combine", "dispatch"):
        step["sizes"] = tuple(draw(st.lists(_SIZES, min_size=most, max_size=most)))
    if verb == "all_to_all_uneven":
        step["sizes"] = tuple(draw(st.lists(_SIZES, min_size=most**2, max_size=most**2)))
    if form.startswith("async") or verb in MESSAGES:
        step["later"] = tuple(draw(st.lists(st.integers(0, 6), min_size=most, max_size=most)))
    return Step(**step)


# --- Faults of one rank --------------------------------------------------------------------------

KINDS = ("stop", "kill", "slip")
COMPARE_NOTHING = ("nodes",)
"""Groups over torch's process groups: what ranks call is not compared before data is used."""

STOPPED_SECONDS = 0.3
ENDED = "its process ended"
"""What a fleet says of a rank that died."""

_ALLOWED: Mapping[str, frozenset[str]] = {
    "stop": frozenset(),
    "kill": frozenset({"PeerLostError", "GroupAbortedError"}),
    "slip": frozenset(
        {"DivergenceError", "GroupAbortedError", "ValueError", "TypeError", "MessageDecodeError"}
    ),
}
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+): ", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one rank."""

    kind: str
    rank: int
    place: int

    def strike(self, step: Step) -> Step:
        """Happen to this process, which is about to take ``step``; the step that it then takes."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif step.verb in TENSOR_VERBS and step.group not in COMPARE_NOTHING:
            if self.place % 2 and step.shape:
                return replace(step, shape=(0, *step.shape[1:]))
            other = torch.int16 if step.dtype.itemsize != torch.int16.itemsize else torch.int32
            return replace(step, dtype=other)
        return step

    def unjustified(self, told: Mapping[int, str]) -> dict[int, str]:
        """What ranks told that this fault does not explain."""
        return {
            rank: text for rank, text in told.items() if text and not self._explains(rank, text)
        }

    def _explains(self, rank: int, text: str) -> bool:
        if self.kind == "kill" and rank == self.rank:
            return text == ENDED
        last = [found.start() for found in _ERROR.finditer(text)][-1:]
        if not last:
            return False
        error = text[last[0] :]
        kind = _ERROR.match(error)
        named = self.kind != "kill" or f"rank {self.rank} " in error
        return kind is not None and kind[1] in _ALLOWED[self.kind] and named


@st.composite
def struck_programs(draw: Draw, n: int, kinds: tuple[str, ...]) -> tuple[Program, Fault]:
    """A program for ``n`` ranks, and what happens in it."""
    program = draw(programs(n))
    place = draw(st.integers(0, len(program.steps) - 1))
    return program, Fault(draw(st.sampled_from(kinds)), draw(st.integers(0, n - 1)), place)
