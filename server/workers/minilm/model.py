"""One pipeline stage of a BERT encoder: embeddings on the first, some layers on each.

The tokens of a batch are concatenated, ``[tokens, hidden]``; see `packing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from ..parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..stages import checkpoint_name, read_parameters, whole_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator import GroupCoordinator

    from ..parallel import Activation
    from .model_config import BertConfig, ModelFolder
    from .packing import AttentionSpan, TokenArrangement

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
    """Token ids int64 [tokens] → [tokens, hidden], of the parameters' dtype.

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
        """Word, position and first-segment vectors, summed and normalised.

        ``positions``: int64 [tokens]: where in its input each token stands.
        """
        words: torch.Tensor = self.words(ids)
        words += self.types.weight[0]
        words += self.positions.weight[positions]
        embedded: torch.Tensor = self.norm(words)
        return embedded


class Layer(nn.Module):
    """One encoder layer, this rank's attention heads and part of the intermediate.

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
        self.up = ColumnParallelLinear(size, inner, tp, _FUNCTIONS[config.activation])
        self.down = RowParallelLinear(inner, size, tp)
        self.down_norm = nn.LayerNorm(size, eps, device="meta")

    def prepare(self) -> None:
        """Merge and lay out what `forward` computes with, once the parameters are there."""
        self.attending = MergedColumnParallelLinear((self.query, self.key, self.value))
        del self.query, self.key, self.value
        for linear in (self.attending, self.attended, self.up, self.down):
            linear.prepack()

    def forward(self, x: torch.Tensor, spans: Sequence[AttentionSpan]) -> torch.Tensor:
        """``spans``: the parts of the batch within which tokens attend to each other."""
        parts = self.attending(x).chunk(3, dim=1)
        heads = [self._attend(span, *(part[span.tokens] for part in parts)) for span in spans]
        attended = heads[0] if len(heads) == 1 else torch.cat(heads)
        x = self.attended_norm(x + self.attended(attended))
        y: torch.Tensor = self.down_norm(x + self.down(self.up(x)))
        return y

    def _attend(self, span: AttentionSpan, *parts: torch.Tensor) -> torch.Tensor:
        """Query, key and value, each [tokens, heads * head_size] → the same shape."""
        query, key, value = (self._rows(span, part) for part in parts)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=span.mask)
        packed = found.transpose(1, 2).flatten(2).flatten(0, 1)
        return packed if span.places is None else packed[span.places]

    def _rows(self, span: AttentionSpan, part: torch.Tensor) -> torch.Tensor:
        if span.places is not None:
            padded = part.new_zeros(span.shape[0] * span.shape[1], part.shape[1])
            part = padded.index_copy_(0, span.places, part)
        return part.view(*span.shape, -1, self.head_size).transpose(1, 2)


class ModelStage(nn.Module):
    """What one pipeline stage computes.

    Args:
        config: the encoder's sizes.
        layers: the layers of this stage, numbered as in the whole encoder.
        tp: the group that every layer is cut over.
    """

    def __init__(self, config: BertConfig, layers: range, tp: GroupCoordinator) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, tp) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(index): Layer(config, tp) for index in layers})

    def prepare(self) -> None:
        """Make ready to compute, once the parameters are there."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.prepare()

    def forward(self, x: torch.Tensor, batch: TokenArrangement) -> torch.Tensor:
        """Run this stage's part on a batch.

        Args:
            x: token ids int64 [tokens] on the first stage; otherwise what the stage before
                returned.
            batch: how its tokens stand.

        Returns:
            [tokens, hidden], the same on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        if self.embeddings is not None:
            x = self.embeddings(x, batch.positions)
        for layer in self.layers.values():
            x = layer(x, batch.spans)
        return x


def _embedding(rows: int, size: int) -> nn.Embedding:
    # nn.Embedding(device="meta") would draw random numbers, for which torch imports its compiler:
    # a second of every worker's start.
    weight = torch.empty(rows, size, device="meta")
    made: nn.Embedding = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
    return made


def load_stage(
    folder: ModelFolder,
    layers: range,
    tp: GroupCoordinator,
    device: torch.device,
    report: Callable[[int, int, str], None],
    dtype: torch.dtype,
) -> ModelStage:
    """Make a stage and read this rank's part of its parameters, as ``dtype``.

    Raises:
        CheckpointError: the weights are not those that the folder's config.json describes.

    Collective: no.
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
    """One vector for each input: [tokens, hidden] → [inputs, hidden].

    Args:
        hidden: the encoder's output.
        lengths: tokens of each input, int64 [inputs].
        how: ``"mean"`` or ``"max"`` over the tokens, or ``"cls"``, the first token's.
    """
    if how == "cls":
        return hidden[lengths.cumsum(0) - lengths]
    return torch.segment_reduce(hidden, how, lengths=lengths)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_FUNCTIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
