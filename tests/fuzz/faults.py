"""What befalls one rank in the middle of a program, and what the others may then see.

A rank that is stopped for a while changes nothing. A rank that is killed is named by every error
that comes of it, soon. A rank that gives a verb another dtype than its peers, or no rows, is found
out before anybody sees wrong data.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from tests.fuzz.generate import programs
from tests.fuzz.verbs import TENSOR_VERBS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hypothesis.strategies import SearchStrategy

    from tests.fuzz.program import Program, Step

    Draw = Callable[[SearchStrategy[Any]], Any]

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
    """One thing that happens to one rank.

    Attributes:
        kind: of `KINDS`.
        rank: whose.
        place: before which step.
    """

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
        """What ranks told that this fault does not explain.

        Args:
            told: by rank, the traceback of the first error, ``""``, or what a fleet says.
        """
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
