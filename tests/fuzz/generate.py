"""Hypothesis strategies for programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.device_comm.oracle import MOVED, REDUCED, ops_for
from tests.fuzz.object_verbs import MESSAGES, OBJECT_VERBS
from tests.fuzz.program import LAYOUTS, Program, Step, groups_of
from tests.fuzz.verbs import REDUCTIONS, TENSOR_VERBS, WITH_FORMS, WITHOUT_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]

MOST_STEPS = 14
MOST_ELEMENTS = 80_000
"""Of one rank's input: above the slots of shared memory, and the pipes of messages."""

_LENGTHS = st.one_of(st.integers(0, 4), st.sampled_from([31, 257, 4099, 33_000, 70_001]))
_SIZES = st.integers(0, 5)
VERBS = (*TENSOR_VERBS, "dispatch", *OBJECT_VERBS, *MESSAGES, "barrier")


def forms_of(verb: str) -> Sequence[str]:
    """How a verb may be called."""
    return WITH_FORMS.get(verb, ("plain", "async"))


@st.composite
def programs(draw: Draw, n: int) -> Program:
    """Programs for ``n`` ranks."""
    return Program(n, tuple(draw(st.lists(steps(n), min_size=1, max_size=MOST_STEPS))))


@st.composite
def steps(draw: Draw, n: int) -> Step:
    """One step for ``n`` ranks."""
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
