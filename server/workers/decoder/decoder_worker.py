"""Run a decoder on the ranks of a pool: the next tokens of many sequences per call.

Steps run as CUDA graphs where possible. A graph has fixed shapes and addresses, so there are
several, for increasing numbers of sequences and lengths; a step uses the smallest that fits. All
ranks of a stage capture a graph at its first use, since all make the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coordinator import GroupCoordinator

from ...config import CONTEXT, SLOTS
from ..model_folder import share
from ..parallel import compute_with, recv_activations, regroup, send_activations
from .decoder_cache import KVCache, ScheduledSequence, choose
from .decoder_folder import DecoderFolder
from .decoder_model import (
    DecoderStage,
    FixedArrangement,
    RotaryTable,
    RowsArrangement,
    load_decoder,
)

if TYPE_CHECKING:
    from ...worker import WorkerContext


_LEAST_REACH = 256
"""Tokens per sequence of the smallest graphs: fewer are not noticeably faster."""


class StepGraphs:
    """Graphs of one stage; the CPU computes the same steps without graphs.

    Clears the cache.
    """

    def __init__(
        self, stage: DecoderStage, tp: GroupCoordinator, rotary: RotaryTable, cache: KVCache
    ) -> None:
        cache.clear(wipe=True)
        self._stage, self._tp, self._rotary, self._cache = stage, tp, rotary, cache
        self._steps: dict[tuple[int, int], _FixedStep] = {}
        self._memory = torch.cuda.graph_pool_handle() if tp.device.type == "cuda" else None

    def take(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Return whether a step can be a graph: one token per row."""
        return all(len(row.tokens) == 1 for row in rows)

    def run(self, rows: Sequence[ScheduledSequence], given: torch.Tensor | None) -> torch.Tensor:
        """Compute a step for which `take` returned true.

        Args:
            rows: rows of the step.
            given: result of the previous stage, [rows, hidden]; ``None`` on the first stage.

        Returns:
            [rows, hidden], equal on every rank of the stage; valid until the next step.

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
        hidden = step.compute()  # loads kernels and makes handles, which a capture must not do
        if self._memory is not None:
            step.capture(self._tp, self._memory)
        return hidden[: len(rows)]


class _FixedStep:
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

    def fill(self, rows: Sequence[ScheduledSequence], given: torch.Tensor | None) -> None:
        self._arrangement.fill(rows)
        if self._given is not None and given is not None:
            self._given[: len(given)] = given
            self._given[len(given) :] = given[-1]

    def compute(self) -> torch.Tensor:
        self._arrangement.prepare()
        x = self._arrangement.tokens if self._given is None else self._given
        hidden: torch.Tensor = self._stage(x, self._arrangement)
        return hidden

    def capture(self, tp: GroupCoordinator, memory: Any) -> None:
        """Capture a graph; `replay` replays it from now on."""
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
    """Return the smallest of ``least``, its doubles, and ``most`` that is at least ``wanted``."""
    size = least
    while size < wanted:
        size *= 2
    return min(size, most)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the workers for their driver.

    Attributes:
        slots: maximum number of sequences.
        context: maximum tokens of a sequence.
        stages: pipeline stages.
        vocabulary: number of token ids, from 0.
        ends: tokens that end an answer.
    """

    slots: int
    context: int
    stages: int
    vocabulary: int
    ends: frozenset[int]


class DecoderWorker:
    """Computes steps of a Llama-type decoder, and caches keys and values.

    Every method must be called on every rank, in the same order.

    Args:
        context: from the pool.
        model: folder of the model.
        slots: maximum number of sequences.
        length: maximum tokens of a sequence; capped at the model's maximum.
        threads: CPU threads of this process; ``None``: torch's default.
        dtype: of weights and activations: ``"float32"`` or ``"float16"``.
        graphs: whether steps of one token per sequence are CUDA graphs; ``None``: on CUDA devices,
            unless all-reduces go through CPU memory, which graphs cannot do.

    Raises:
        FileNotFoundError, DecoderFolderError, CheckpointError: the model is missing or unsupported.
        ValueError: the pool's tp or pp does not fit the model, or an argument is not positive.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: str | os.PathLike[str],
        slots: int = SLOTS,
        length: int = CONTEXT,
        threads: int | None = None,
        dtype: str = "float32",
        graphs: bool | None = None,
    ) -> None:
        if slots < 1 or length < 1:
            raise ValueError(f"slots and length must be 1 or more; got {slots} and {length}")
        kind = compute_with(threads, dtype)
        folder = DecoderFolder.open(model)
        self._config = config = folder.config
        self._groups, self._device = context.groups, context.device
        tp, pp = self._groups.tp, self._groups.pp
        config.check_parallel(tp.world_size, pp.world_size)
        layers = share(config.num_hidden_layers, pp.rank_in_group, pp.world_size)
        self._stage = load_decoder(folder, layers, tp, self._device, context.report_progress, kind)
        length = min(length, config.max_position_embeddings)
        self._limits = EngineLimits(slots, length, pp.world_size, config.vocab_size, folder.ends)
        self._rotary = RotaryTable(config, length, kind, self._device)
        self._cache = KVCache(
            len(layers),
            slots,
            config.heads(tp.world_size).keys[tp.rank_in_group],
            length,
            config.head_size,
            kind,
            self._device,
        )
        self._wants_graphs = graphs
        self._graphs = self._make_graphs()

    def restore(self, context: WorkerContext) -> None:
        """Continue in new groups with the same weights and an empty cache."""
        self._groups = context.groups
        self._cache.clear()
        regroup(self._stage, context.groups.tp)
        self._graphs = self._make_graphs()

    def limits(self) -> EngineLimits:
        """Return the limits of these workers."""
        return self._limits

    @torch.inference_mode()
    def step(self, rows: Sequence[ScheduledSequence]) -> list[int] | None:
        """Compute the next tokens of sequences, each in its own slot.

        Args:
            rows: one or more.

        Returns:
            The drawn tokens, one per row that draws, on the first rank of the last stage, otherwise
                ``None``.

        Raises:
            CacheLostError, ValueError: see `KVCache.extend`; on every rank, before any
                communication.

        Collective: yes, every rank of the pool.
        """
        self._cache.extend(rows)
        tp, pp = self._groups.tp, self._groups.pp
        given = None if pp.is_first_rank else recv_activations(self._groups)
        if self._graphs is not None and self._graphs.take(rows):
            hidden = self._graphs.run(rows, given)
            ends = torch.tensor([number for number, row in enumerate(rows) if row.draw])
        else:
            arranged = RowsArrangement(rows, self._config, self._rotary, self._cache)
            hidden = self._stage(arranged.tokens if given is None else given, arranged)
            ends = arranged.ends
        if not pp.is_last_rank:
            send_activations(self._groups, hidden)
            return None
        draws = [row.draw for row in rows if row.draw]
        if not draws:
            return []
        if len(draws) < len(hidden):
            hidden = hidden[ends]
        logits = tp.gather(self._stage.logits(hidden), dst=0)
        if logits is None:
            return None
        tokens = choose(logits[:, : self._config.vocab_size].float(), draws)
        tp.check()  # a replay of a graph raises nothing
        return tokens

    def _make_graphs(self) -> StepGraphs | None:
        tp, wanted = self._groups.tp, self._wants_graphs
        if wanted is None and self._device.type == "cuda":
            size = self._config.hidden_size * self._limits.slots * self._rotary.cos.itemsize
            wanted = tp.explain().backend("all_reduce", size) != "host"
        return StepGraphs(self._stage, tp, self._rotary, self._cache) if wanted else None
