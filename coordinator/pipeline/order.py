"""In which order a stage works on micro-batches: pure functions.

Three stages, four micro-batches, a number for forward and a number in brackets for backward:

    gpipe              0 1 2 3 . . [0] [1] [2] [3]         one_f_one_b   0 1 2 [0] 3 [1] [2] [3]
    all forward, then    0 1 2 3 [0] [1] [2] [3]           backward as     0 1 [0] 2 [1] 3 [2] [3]
    all backward           0 1 2 3 [0] …                   soon as can be    0 [0] 1 [1] 2 [2] 3 [3]

With `gpipe` a stage keeps what backward needs of all micro-batches, with `one_f_one_b` of as
many as there are stages from it to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage.

    Attributes:
        micro_batch: its number.
        is_backward: whether its gradients are computed, not its outputs.
    """

    micro_batch: int
    is_backward: bool = False

    def __str__(self) -> str:
        return f"[{self.micro_batch}]" if self.is_backward else str(self.micro_batch)


Order = Callable[[int, int, int], list[Action]]
"""The actions of a stage, given its number, how many stages and how many micro-batches."""


def forward_only(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Outputs without gradients."""
    _check(stage, stages, micro_batches)
    return [Action(number) for number in range(micro_batches)]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward, then all backward, in the same order."""
    forward = forward_only(stage, stages, micro_batches)
    return forward + [Action(number, is_backward=True) for number in range(micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Forward as far as the last stage can answer, then one backward after each forward."""
    _check(stage, stages, micro_batches)
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action(number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        actions += [Action(number), Action(number - ahead, is_backward=True)]
    rest = range(micro_batches - ahead, micro_batches)
    return actions + [Action(number, is_backward=True) for number in rest]


def _check(stage: int, stages: int, micro_batches: int) -> None:
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    if micro_batches < 1:
        raise ValueError(f"there has to be a micro-batch; got {micro_batches}")
