"""Sentence embeddings on the ranks of a worker pool.

Each stage of the pipeline sends a batch to the next one as soon as it has computed its layers.
Every rank cuts a call into the same batches, so nothing else has to be exchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ...defaults import BATCH_TOKENS
from ..parallel import regroup
from ..shares import share
from ..stages import compute_with, hand_on, handed_on
from .model import load_stage, pool
from .model_config import ModelFolder
from .packing import arrange, make_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...worker import WorkerContext
    from .packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one worker stands, and what it holds.

    Attributes:
        rank: in the world.
        pid: its process id.
        tp_rank: which part of every layer it has.
        pp_rank: which stage of the pipeline it is.
        layers: first layer of its stage, and one past the last.
        parameter_bytes: what its parameters occupy.
    """

    rank: int
    pid: int
    tp_rank: int
    pp_rank: int
    layers: tuple[int, int]
    parameter_bytes: int


class MiniLMWorker:
    """Embeds lists of tokens with a BERT-type sentence-transformers model.

    Args:
        context: who this worker is; from the pool.
        model: the model's folder.
        batch_tokens: tokens computed at once.
        threads: CPU threads of this process for tensor work; ``None`` leaves torch's choice,
            which takes every core for every worker.
        dtype: of weights and activations: ``"float32"`` or ``"float16"``.

    Raises:
        FileNotFoundError, ModelFolderError, CheckpointError: the model cannot be run.
        ValueError: the pool's tp or pp does not fit the model, or an argument is not positive.

    Every method must be called on every rank, in the same order.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: str | os.PathLike[str],
        batch_tokens: int = BATCH_TOKENS,
        threads: int | None = None,
        dtype: str = "float32",
    ) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be 1 or more; got {batch_tokens}")
        kind = compute_with(threads, dtype)
        self._groups = context.groups
        self._device = context.device
        self._batch_tokens = batch_tokens
        self._folder = ModelFolder.open(model)
        tp, pp = self._groups.tp, self._groups.pp
        config = self._folder.bert
        config.check_parallel(tp.world_size, pp.world_size)
        self._layers = share(config.num_hidden_layers, pp.rank_in_group, pp.world_size)
        self._stage = load_stage(
            self._folder,
            self._layers,
            tp,
            self._device,
            context.report_progress,
            kind,
        )

    def restore(self, context: WorkerContext) -> None:
        """Go on in new groups, with the weights as they are. Collective: no."""
        self._groups = context.groups
        regroup(self._stage, context.groups.tp)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[np.ndarray]) -> np.ndarray | None:
        """The embeddings of some lists of token ids, integers [length] each, special ones included.

        Returns:
            float32 [len(tokens), hidden] on the first rank of the last stage; otherwise ``None``.

        Raises:
            ValueError: a list is empty, too long, or has an id outside the vocabulary; on every
                rank, before any communication.

        Collective: yes, every rank of the pool.
        """
        self._folder.check_tokens(tokens)
        vectors = np.empty((len(tokens), self._folder.bert.hidden_size), dtype=np.float32)
        for batch in make_batches([len(each) for each in tokens], self._batch_tokens):
            arranged = arrange(batch.lengths, self._device)
            hidden = self._stage(self._input(batch, tokens), arranged)
            if self._groups.pp.is_last_rank:
                vectors[batch.rows] = self._sentence_vectors(hidden, arranged.lengths).cpu().numpy()
            else:
                hand_on(self._groups, hidden)
        is_output = self._groups.pp.is_last_rank and self._groups.tp.is_first_rank
        return vectors if is_output else None

    def placed(self) -> Placed:
        """Where this worker stands. Collective: no."""
        parameters = self._stage.parameters()
        return Placed(
            rank=self._groups.world.rank,
            pid=os.getpid(),
            tp_rank=self._groups.tp.rank_in_group,
            pp_rank=self._groups.pp.rank_in_group,
            layers=(self._layers.start, self._layers.stop),
            parameter_bytes=sum(tensor.nbytes for tensor in parameters),
        )

    def _sentence_vectors(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        vectors = pool(hidden.float(), lengths, self._folder.pooling)
        return functional.normalize(vectors, dim=1) if self._folder.normalize else vectors

    def _input(self, batch: PackedBatch, tokens: Sequence[np.ndarray]) -> torch.Tensor:
        """What this stage computes on: the batch's tokens, or what the stage before has sent."""
        if not self._groups.pp.is_first_rank:
            return handed_on(self._groups)
        ids = np.concatenate([tokens[row] for row in batch.rows], dtype=np.int64)
        return torch.from_numpy(ids).to(self._device)
