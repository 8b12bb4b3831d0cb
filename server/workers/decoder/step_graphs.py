"""Steps in which every sequence has one token, as CUDA graphs: one launch, in place of a thousand.

A graph computes with the shapes and addresses that it was captured with. So there are some, for
more and more sequences and for longer and longer ones, and a step takes the smallest that it fits.
Each is captured when it is first needed, by all ranks of a stage, since all make the same steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .step_arrangement import FixedArrangement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator import GroupCoordinator

    from .decoder_model import DecoderStage
    from .kv_cache import KVCache, Row
    from .step_arrangement import RotaryTable

_LEAST_REACH = 256
"""Tokens of a sequence that the smallest graphs take: fewer are not computed noticeably faster."""


class StepGraphs:
    """The graphs of one stage.

    On the CPU, where there are none, the same steps are computed one operation after another.

    Args:
        stage: of the model.
        tp: the group that computes it.
        rotary: of the model.
        cache: forgets all sequences.
    """

    def __init__(
        self, stage: DecoderStage, tp: GroupCoordinator, rotary: RotaryTable, cache: KVCache
    ) -> None:
        cache.clear(wipe=True)
        self._stage, self._tp, self._rotary, self._cache = stage, tp, rotary, cache
        self._steps: dict[tuple[int, int], _FixedStep] = {}
        self._memory = torch.cuda.graph_pool_handle() if tp.device.type == "cuda" else None

    def take(self, rows: Sequence[Row]) -> bool:
        """Whether a step can be a graph."""
        return all(len(row.tokens) == 1 for row in rows)

    def run(self, rows: Sequence[Row], given: torch.Tensor | None) -> torch.Tensor:
        """Compute a step that they `take`.

        Args:
            rows: of the step.
            given: what the stage before returned, [rows, hidden]; ``None`` on the first stage.

        Returns:
            [rows, hidden], the same on every rank of the stage; good until the next step.

        Collective: yes, every member of the tensor-parallel group.
        """
        size = _at_least(len(rows), 1, self._cache.slots)
        reach = _at_least(max(row.stop for row in rows), _LEAST_REACH, self._cache.context)
        step = self._steps.get((size, reach))
        if step is not None:
            step.fill(rows, given)
            return step.replay()[: len(rows)]
        arrangement = FixedArrangement(size, reach, self._rotary, self._cache)
        step = self._steps[size, reach] = _FixedStep(self._stage, arrangement, size, given)
        step.fill(rows, given)
        hidden = step.compute()  # also loads kernels and makes handles, as a capture must not
        if self._memory is not None:
            step.capture(self._tp, self._memory)
        return hidden[: len(rows)]


class _FixedStep:
    """A step whose inputs lie at fixed addresses.

    Args:
        given: of the first step of this size; see `StepGraphs.run`.
    """

    def __init__(
        self,
        stage: DecoderStage,
        arrangement: FixedArrangement,
        size: int,
        given: torch.Tensor | None,
    ) -> None:
        self._stage, self._arrangement = stage, arrangement
        self._given = None if given is None else given.new_empty(size, given.shape[1])
        self.replay = self.compute

    def fill(self, rows: Sequence[Row], given: torch.Tensor | None) -> None:
        """Take the inputs of a step."""
        self._arrangement.fill(rows)
        if self._given is not None and given is not None:
            self._given[: len(given)] = given
            self._given[len(given) :] = given[-1]

    def compute(self) -> torch.Tensor:
        """Compute it, one operation after another."""
        self._arrangement.prepare()
        x = self._arrangement.tokens if self._given is None else self._given
        hidden: torch.Tensor = self._stage(x, self._arrangement)
        return hidden

    def capture(self, tp: GroupCoordinator, memory: Any) -> None:
        """From now on `replay` replays a graph, which takes its memory from a pool of graphs."""
        graph = torch.cuda.CUDAGraph()
        with (
            tp.graph_capture() as context,
            torch.cuda.graph(graph, pool=memory, stream=context.stream),
        ):
            hidden = self.compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        self.replay = replay


def _at_least(wanted: int, least: int, most: int) -> int:
    """The smallest of ``least``, its doubles, and ``most`` that is not below ``wanted``."""
    found = least
    while found < wanted:
        found *= 2
    return min(found, most)
