"""Run a decoder on the ranks of a pool: the next tokens of many sequences at once, as CUDA graphs
where it can.

A graph computes with the shapes and addresses that it was captured with. So there are some, for
more and more sequences and for longer and longer ones, and a step takes the smallest that it fits.
Each is captured when it is first needed, by all ranks of a stage, since all make the same steps.
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
from .decoder_config import DecoderFolder
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

    def take(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether a step can be a graph."""
        return all(len(row.tokens) == 1 for row in rows)

    def run(self, rows: Sequence[ScheduledSequence], given: torch.Tensor | None) -> torch.Tensor:
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

    def fill(self, rows: Sequence[ScheduledSequence], given: torch.Tensor | None) -> None:
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


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the workers take, which their driver has to keep to.

    Attributes:
        slots: sequences at once.
        context: tokens of a sequence at most.
        stages: of the pipeline.
        vocabulary: how many token ids there are, from 0.
        ends: tokens that end an answer.
    """

    slots: int
    context: int
    stages: int
    vocabulary: int
    ends: frozenset[int]


class DecoderWorker:
    """Computes steps of a Llama-type decoder, and keeps the sequences' keys and values.

    Args:
        context: who this worker is; from the pool.
        model: the model's folder.
        slots: sequences at once.
        length: tokens of a sequence at most; no more than the model takes.
        threads: CPU threads of this process for tensor work; ``None`` leaves torch's choice.
        dtype: of weights and activations: ``"float32"`` or ``"float16"``.
        graphs: whether steps that take one token of each sequence are CUDA graphs; ``None``: on
            CUDA devices, unless the ranks' sums go through CPU memory, which graphs cannot do.

    Raises:
        FileNotFoundError, DecoderFolderError, CheckpointError: the model cannot be run.
        ValueError: the pool's tp or pp does not fit the model, or an argument is not positive.

    Every method must be called on every rank, in the same order.
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
        """Go on in new groups, with the weights as they are and no sequences. Collective: no."""
        self._groups = context.groups
        self._cache.clear()
        regroup(self._stage, context.groups.tp)
        self._graphs = self._make_graphs()

    def limits(self) -> EngineLimits:
        """What these workers take. Collective: no."""
        return self._limits

    @torch.inference_mode()
    def step(self, rows: Sequence[ScheduledSequence]) -> list[int] | None:
        """Compute the next tokens of some sequences, each in a slot of its own.

        Args:
            rows: one or more.

        Returns:
            The tokens drawn, one for each row that draws, on the first rank of the last stage;
            otherwise ``None``.

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
        tp.check()  # a replay raises nothing
        return tokens

    def _make_graphs(self) -> StepGraphs | None:
        """Those of the present groups, if any are wanted."""
        tp, wanted = self._groups.tp, self._wants_graphs
        if wanted is None and self._device.type == "cuda":
            size = self._config.hidden_size * self._limits.slots * self._rotary.cos.itemsize
            wanted = tp.explain().backend("all_reduce", size) != "host"
        return StepGraphs(self._stage, tp, self._rotary, self._cache) if wanted else None
