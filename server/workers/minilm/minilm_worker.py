"""Compute sentence embeddings on the ranks of a pool with a BERT encoder.

The tokens of a batch are concatenated, ``[tokens, hidden]``. Only attention needs one row per
input: inputs of similar length form an `AttentionSpan` and are padded to the longest of them, with
never more padding than tokens.

Each pipeline stage sends a batch to the next one as soon as it has computed its layers. Every rank
divides a call into the same batches, so ranks exchange nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from coordinator import GroupCoordinator

from ...config import BATCH_TOKENS
from ..model_folder import share
from ..parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint_name,
    compute_with,
    read_parameters,
    recv_activations,
    regroup,
    send_activations,
    whole_parameters,
)
from .model_config import BertConfig, ModelFolder

if TYPE_CHECKING:
    from ...worker import WorkerContext


_SHORT = 16
"""Inputs of at most this many tokens form one span: another span costs more than padding."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Indexes and token counts of some of a call's inputs, the longest first."""

    rows: list[int]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class TokenArrangement:
    """Positions of a batch's tokens, on the model's device.

    Attributes:
        lengths: int64 [inputs].
        positions: int64 [tokens]: index of each token in its input.
        spans: all inputs, in order.
    """

    lengths: torch.Tensor
    positions: torch.Tensor
    spans: list[AttentionSpan]


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Inputs of a batch that are padded to one length for attention.

    Attributes:
        tokens: their tokens in the batch.
        shape: number of inputs, and tokens of the longest.
        places: int64: index of each token after padding; ``None`` without padding.
        mask: bool [inputs, 1, 1, longest]: false for padding; ``None`` without padding.
    """

    tokens: slice
    shape: tuple[int, int]
    places: torch.Tensor | None
    mask: torch.Tensor | None


def make_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[PackedBatch]:
    """Yield batches of at most ``max_tokens`` tokens; a longer input is a batch of its own."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rows: list[int] = []
    room = max_tokens
    for row in order:
        if rows and lengths[row] > room:
            yield PackedBatch(rows, [lengths[each] for each in rows])
            rows, room = [], max_tokens
        rows.append(row)
        room -= lengths[row]
    if rows:
        yield PackedBatch(rows, [lengths[each] for each in rows])


def arrange(lengths: Sequence[int], device: torch.device) -> TokenArrangement:
    """Return the arrangement of a batch; ``lengths``: tokens of its inputs, the longest first."""
    return TokenArrangement(
        torch.tensor(lengths, device=device),
        torch.cat([torch.arange(length) for length in lengths]).to(device),
        _spans(lengths, device),
    )


def _spans(lengths: Sequence[int], device: torch.device) -> list[AttentionSpan]:
    spans: list[AttentionSpan] = []
    row = token = 0
    while row < len(lengths):
        longest = lengths[row]
        least = longest // 2 if longest > _SHORT else 0
        end = row
        while end < len(lengths) and lengths[end] > least:
            end += 1
        spans.append(_span(np.array(lengths[row:end]), token, device))
        token = spans[-1].tokens.stop
        row = end
    return spans


def _span(lengths: np.ndarray, first: int, device: torch.device) -> AttentionSpan:
    longest = int(lengths[0])
    tokens = slice(first, first + int(lengths.sum()))
    shape = (len(lengths), longest)
    if lengths[-1] == longest:
        return AttentionSpan(tokens, shape, None, None)
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    places = mask.flatten().nonzero().squeeze(1)
    return AttentionSpan(tokens, shape, places.to(device), mask[:, None, None, :].to(device))


_CHECKPOINT_NAMES = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.types": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attended_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}


class Embeddings(nn.Module):
    """Token ids int64 [tokens] → [tokens, hidden], in the parameters' dtype.

    Collective: yes, every member of ``tp``.
    """

    def __init__(self, config: BertConfig, tp: GroupCoordinator) -> None:
        super().__init__()
        size = config.hidden_size
        self.words = VocabParallelEmbedding(config.vocab_size, size, tp)
        self.positions = _embedding(config.max_position_embeddings, size)
        self.types = _embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps, device="meta")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return word, position and first-segment vectors, summed and normalised.

        ``positions``: int64 [tokens]: index of each token in its input.
        """
        words: torch.Tensor = self.words(ids)
        words += self.types.weight[0]
        words += self.positions.weight[positions]
        embedded: torch.Tensor = self.norm(words)
        return embedded


class Layer(nn.Module):
    """Encoder layer, with this rank's attention heads and part of the intermediate.

    [tokens, hidden] → the same. Collective: yes, every member of ``tp``.
    """

    def __init__(self, config: BertConfig, tp: GroupCoordinator) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.head_size = config.head_size
        self.query = ColumnParallelLinear(size, size, tp)
        self.key = ColumnParallelLinear(size, size, tp)
        self.value = ColumnParallelLinear(size, size, tp)
        self.attended = RowParallelLinear(size, size, tp)
        self.attended_norm = nn.LayerNorm(size, eps, device="meta")
        self.up = ColumnParallelLinear(size, inner, tp, config.activation)
        self.down = RowParallelLinear(inner, size, tp)
        self.down_norm = nn.LayerNorm(size, eps, device="meta")

    def prepare(self) -> None:
        """Merge and prepack the loaded weights."""
        self.attending = MergedColumnParallelLinear((self.query, self.key, self.value))
        del self.query, self.key, self.value
        for linear in (self.attending, self.attended, self.up, self.down):
            linear.prepack()

    def forward(self, x: torch.Tensor, spans: Sequence[AttentionSpan]) -> torch.Tensor:
        """Compute the layer; tokens attend to each other within each of ``spans``."""
        parts = self.attending(x).chunk(3, dim=1)
        heads = [self._attend(span, *(part[span.tokens] for part in parts)) for span in spans]
        attended = heads[0] if len(heads) == 1 else torch.cat(heads)
        x = self.attended_norm(x + self.attended(attended))
        y: torch.Tensor = self.down_norm(x + self.down(self.up(x)))
        return y

    def _attend(self, span: AttentionSpan, *parts: torch.Tensor) -> torch.Tensor:
        """Query, key and value, each [tokens, heads * head_size] → the same shape."""
        query, key, value = (self._rows(span, part) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=span.mask)
        packed = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return packed if span.places is None else packed[span.places]

    def _rows(self, span: AttentionSpan, part: torch.Tensor) -> torch.Tensor:
        if span.places is not None:
            padded = part.new_zeros(span.shape[0] * span.shape[1], part.shape[1])
            part = padded.index_copy_(0, span.places, part)
        return part.view(*span.shape, -1, self.head_size).transpose(1, 2)


class ModelStage(nn.Module):
    """Layers of one pipeline stage.

    Args:
        config: sizes of the encoder.
        layers: layers of this stage, numbered as in the whole encoder.
        tp: group over which every layer is sharded.
    """

    def __init__(self, config: BertConfig, layers: range, tp: GroupCoordinator) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, tp) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(index): Layer(config, tp) for index in layers})

    def prepare(self) -> None:
        """Merge and prepack the loaded weights of all layers."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.prepare()

    def forward(self, x: torch.Tensor, batch: TokenArrangement) -> torch.Tensor:
        """Compute this stage's layers for a batch.

        Args:
            x: token ids int64 [tokens] on the first stage, otherwise the previous stage's result.
            batch: arrangement of the tokens.

        Returns:
            [tokens, hidden], equal on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        if self.embeddings is not None:
            x = self.embeddings(x, batch.positions)
        for layer in self.layers.values():
            x = layer(x, batch.spans)
        return x


def _embedding(rows: int, size: int) -> nn.Embedding:
    # nn.Embedding(device="meta") draws random numbers, for which torch imports its compiler: 1 s.
    weight = torch.empty(rows, size, device="meta")
    module: nn.Embedding = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
    return module


def load_stage(
    folder: ModelFolder,
    layers: range,
    tp: GroupCoordinator,
    device: torch.device,
    report: Callable[[int, int, str], None],
    dtype: torch.dtype,
) -> ModelStage:
    """Make a stage, and read this rank's part of its parameters as ``dtype``.

    Raises:
        CheckpointError: the weights differ from the folder's config.json.
    """
    stage = ModelStage(folder.bert, layers, tp)
    whole = whole_parameters(stage)
    names = {
        name: folder.prefix + checkpoint_name(name, "encoder.layer", _CHECKPOINT_NAMES)
        for name in whole
    }
    tensors = read_parameters(
        folder.weights, whole, names, tp, device=device, dtype=dtype, report=report
    )
    stage.load_state_dict(tensors, assign=True)
    stage.prepare()
    return stage.eval().requires_grad_(False)


def pool(hidden: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
    """Return one vector per input: [tokens, hidden] → [inputs, hidden].

    Args:
        hidden: output of the encoder.
        lengths: tokens of each input, int64 [inputs].
        how: ``"mean"`` or ``"max"`` over the tokens, or ``"cls"``: the first token.
    """
    if how == "cls":
        return hidden[lengths.cumsum(0) - lengths]
    return torch.segment_reduce(hidden, how, lengths=lengths)


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement of one worker; ``layers``: its first layer, and one past the last."""

    rank: int
    pid: int
    tp_rank: int
    pp_rank: int
    layers: tuple[int, int]
    parameter_bytes: int


class MiniLMWorker:
    """Embeds lists of tokens with a BERT-type sentence-transformers model.

    Every method must be called on every rank, in the same order.

    Args:
        context: from the pool.
        model: folder of the model.
        batch_tokens: tokens computed at once.
        threads: CPU threads of this process; ``None``: torch's default, every core for every
            worker.
        dtype: of weights and activations: ``"float32"`` or ``"float16"``.

    Raises:
        FileNotFoundError, ModelFolderError, CheckpointError: the model is missing or unsupported.
        ValueError: the pool's tp or pp does not fit the model, or an argument is not positive.
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
        """Continue in new groups with the same weights."""
        self._groups = context.groups
        regroup(self._stage, context.groups.tp)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return the embeddings of lists of token ids, with special tokens.

        Args:
            tokens: integers [length] for each input.

        Returns:
            float32 [len(tokens), hidden] on the first rank of the last stage, otherwise ``None``.

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
                send_activations(self._groups, hidden)
        is_output = self._groups.pp.is_last_rank and self._groups.tp.is_first_rank
        return vectors if is_output else None

    def placed(self) -> Placed:
        """Return the placement of this worker."""
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
        if not self._groups.pp.is_first_rank:
            return recv_activations(self._groups)
        ids = np.concatenate([tokens[row] for row in batch.rows], dtype=np.int64)
        return torch.from_numpy(ids).to(self._device)
