"""A decoder on the ranks of a worker pool: computes the next tokens of many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...defaults import CONTEXT, SLOTS
from ..parallel import regroup
from ..shares import share
from ..stages import compute_with, hand_on, handed_on
from .decoder_config import DecoderFolder
from .decoder_model import load_decoder
from .kv_cache import KVCache
from .sampling import choose
from .step_arrangement import RotaryTable, RowsArrangement
from .step_graphs import StepGraphs

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ...worker import WorkerContext
    from .kv_cache import Row


@dataclass(frozen=True, slots=True)
class Room:
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
        self._room = Room(slots, length, pp.world_size, config.vocab_size, folder.ends)
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

    def room(self) -> Room:
        """What these workers take. Collective: no."""
        return self._room

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[int] | None:
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
        given = None if pp.is_first_rank else handed_on(self._groups)
        if self._graphs is not None and self._graphs.take(rows):
            hidden = self._graphs.run(rows, given)
            ends = torch.tensor([number for number, row in enumerate(rows) if row.draw])
        else:
            arranged = RowsArrangement(rows, self._config, self._rotary, self._cache)
            hidden = self._stage(arranged.tokens if given is None else given, arranged)
            ends = arranged.ends
        if not pp.is_last_rank:
            hand_on(self._groups, hidden)
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
            size = self._config.hidden_size * self._room.slots * self._rotary.cos.itemsize
            wanted = tp.explain().backend("all_reduce", size) != "host"
        return StepGraphs(self._stage, tp, self._rotary, self._cache) if wanted else None
