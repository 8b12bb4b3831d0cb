"""Sentence embeddings on the ranks of a worker pool.

The stages of the pipeline run behind one another: the first tokenizes, and sends each batch on
as soon as it has computed its layers, with what later stages must know of it beside the
tensor: which inputs, their lengths, and how many batches are still to come. What it cannot
tokenize it refuses: it sends its rank instead, and each stage passes that on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from server.devices import DTYPES
from server.errors import CallRefusedError
from server.workers.minilm.config import ModelFolder
from server.workers.minilm.model import load_stage, pool, stage_layers
from server.workers.minilm.tokenizer import SentenceTokenizer, TokenBatch, make_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from server.worker import WorkerContext


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


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch on its way through the stages: ``x`` is ids at first, hidden states later."""

    rows: list[int]
    lengths: list[int]
    left: int
    x: torch.Tensor


class MiniLMWorker:
    """Embeds texts with a BERT-type sentence-transformers model.

    Args:
        context: who this worker is; from the pool.
        model: the model's folder.
        batch_size: inputs computed at once.
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
        batch_size: int = 32,
        threads: int | None = None,
        dtype: str = "float32",
    ) -> None:
        if batch_size < 1 or (threads is not None and threads < 1):
            raise ValueError(
                f"batch_size and threads must be 1 or more; got {batch_size} and {threads}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._groups = context.groups
        self._device = context.device
        self._batch_size = batch_size
        self._folder = ModelFolder.open(model)
        tp, pp = self._groups.tp, self._groups.pp
        config = self._folder.bert
        config.check_parallel(tp.world_size, pp.world_size)
        self._tokenizer = SentenceTokenizer(self._folder) if pp.is_first_rank else None
        self._layers = stage_layers(config.num_hidden_layers, pp.rank_in_group, pp.world_size)
        self._stage = load_stage(
            self._folder,
            self._layers,
            tp,
            self._device,
            context.report_progress,
            getattr(torch, dtype),
        )

    def embed(self, inputs: Sequence[str | Sequence[int]]) -> np.ndarray | None:
        """The embeddings of some texts, or of some lists of token ids.

        Returns:
            float32 [len(inputs), hidden] on the first rank of the last stage; otherwise
            ``None``.

        Raises:
            TypeError, ValueError: see `ModelFolder.check_inputs`; on every rank, before any
                communication.
            CallRefusedError: the tokenizer does not take a text; on every rank.

        Collective: yes, every rank of the pool.
        """
        found = self.embed_counted(inputs)
        return None if found is None else found[0]

    @torch.inference_mode()
    def embed_counted(
        self, inputs: Sequence[str | Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """As `embed`, with the tokens that each input took, special ones included: int64 [n]."""
        self._folder.check_inputs(inputs)
        vectors = np.empty((len(inputs), self._folder.bert.hidden_size), dtype=np.float32)
        tokens = np.empty(len(inputs), dtype=np.int64)
        for batch in self._batches(inputs):
            lengths = torch.tensor(batch.lengths, device=self._device)
            hidden = self._stage(batch.x.to(self._device), lengths)
            if self._groups.pp.is_last_rank:
                vectors[batch.rows] = self._sentence_vectors(hidden, lengths).cpu().numpy()
                tokens[batch.rows] = batch.lengths
            else:
                self._send(batch, hidden)
        is_output = self._groups.pp.is_last_rank and self._groups.tp.is_first_rank
        return (vectors, tokens) if is_output else None

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

    def _batches(self, inputs: Sequence[str | Sequence[int]]) -> Iterator[_Batch]:
        if self._tokenizer is not None:
            made = self._tokenized(self._tokenizer, inputs)
            for left, tokens in zip(reversed(range(len(made))), made, strict=True):
                yield _Batch(tokens.rows, tokens.lengths, left, tokens.ids)
            return
        left = 1 if inputs else 0
        while left:
            batch = self._receive()
            yield batch
            left = batch.left

    def _tokenized(
        self, tokenizer: SentenceTokenizer, inputs: Sequence[str | Sequence[int]]
    ) -> list[TokenBatch]:
        try:
            return list(make_batches(tokenizer.encode(inputs), self._batch_size))
        except Exception as error:
            self._pass_on_refusal(self._groups.world.rank)
            raise CallRefusedError from error

    def _pass_on_refusal(self, rank: int) -> None:
        if not self._groups.pp.is_last_rank:
            self._groups.pp.send_tensor_dict({"refused": rank})

    def _send(self, batch: _Batch, hidden: torch.Tensor) -> None:
        message = {
            "rows": batch.rows, "lengths": batch.lengths, "left": batch.left, "hidden": hidden,
        }  # fmt: skip
        self._groups.pp.send_tensor_dict(message, all_gather_group=self._groups.tp)

    def _receive(self) -> _Batch:
        message = self._groups.pp.recv_tensor_dict(all_gather_group=self._groups.tp)
        if (rank := message.get("refused")) is not None:
            self._pass_on_refusal(rank)
            raise CallRefusedError(rank)
        return _Batch(message["rows"], message["lengths"], message["left"], message["hidden"])
