"""One pipeline stage of a BERT encoder: embeddings on the first, some layers on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from coordinator.layout import load_sharded
from server.workers.minilm.parallel import (
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    whole_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator import GroupCoordinator
    from server.workers.minilm.config import BertConfig, ModelFolder

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
    """Token ids int64 [batch, length] → [batch, length, hidden], of the parameters' dtype.

    Collective: yes, every member of ``tp``.
    """

    def __init__(self, config: BertConfig, tp: GroupCoordinator) -> None:
        super().__init__()
        size = config.hidden_size
        self.words = VocabEmbedding(config.vocab_size, size, tp)
        self.positions = nn.Embedding(config.max_position_embeddings, size, device="meta")
        self.types = nn.Embedding(config.type_vocab_size, size, device="meta")
        self.norm = nn.LayerNorm(size, config.layer_norm_eps, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Word, position and first-segment vectors, summed and normalised."""
        words: torch.Tensor = self.words(ids)
        words += self.types.weight[0]
        words += self.positions.weight[: ids.shape[1]]
        embedded: torch.Tensor = self.norm(words)
        return embedded


class Layer(nn.Module):
    """One encoder layer, this rank's attention heads and part of the intermediate.

    [batch, length, hidden] → the same. Collective: yes, every member of ``tp``.
    """

    def __init__(self, config: BertConfig, tp: GroupCoordinator) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.head_size = config.head_size
        self.query = ColumnLinear(size, size, tp)
        self.key = ColumnLinear(size, size, tp)
        self.value = ColumnLinear(size, size, tp)
        self.attended = RowLinear(size, size, tp)
        self.attended_norm = nn.LayerNorm(size, eps, device="meta")
        self.up = ColumnLinear(size, inner, tp)
        self.activation = _FUNCTIONS[config.activation]
        self.down = RowLinear(inner, size, tp)
        self.down_norm = nn.LayerNorm(size, eps, device="meta")

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``mask``: bool [batch, 1, 1, length], true where there is a token."""
        heads = functional.scaled_dot_product_attention(
            self._heads(self.query(x)),
            self._heads(self.key(x)),
            self._heads(self.value(x)),
            attn_mask=mask,
        )
        x = self.attended_norm(x + self.attended(heads.transpose(1, 2).flatten(2)))
        y: torch.Tensor = self.down_norm(x + self.down(self.activation(self.up(x))))
        return y

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Stage(nn.Module):
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

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Run this stage's part on a batch.

        Args:
            x: token ids int64 [batch, length] on the first stage; otherwise what the stage
                before returned.
            lengths: tokens of each row, int64 [batch]; what follows them is padding.

        Returns:
            [batch, length, hidden], the same on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        mask = token_mask(lengths, x.shape[1])[:, None, None, :]
        if self.embeddings is not None:
            x = self.embeddings(x)
        for layer in self.layers.values():
            x = layer(x, mask)
        return x


def load_stage(
    folder: ModelFolder,
    layers: range,
    tp: GroupCoordinator,
    device: torch.device,
    report: Callable[[int, int, str], None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Stage:
    """Make a stage and read this rank's part of its parameters, as ``dtype``.

    Raises:
        CheckpointError: the weights are not those that the folder's config.json describes.

    Collective: no.
    """
    stage = Stage(folder.bert, layers, tp)
    whole = whole_parameters(stage)
    tensors = load_sharded(
        folder.weights,
        {name: parameter.layout for name, parameter in whole.items()},
        tp,
        source=lambda name: folder.prefix + checkpoint_name(name),
        shapes={name: parameter.shape for name, parameter in whole.items()},
        dtype=dtype,
        device=device,
        report=report,
    )
    stage.load_state_dict(tensors, assign=True)
    return stage.eval().requires_grad_(False)


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a stage's parameter."""
    module, _, parameter = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".")
        return f"encoder.layer.{index}.{_CHECKPOINT_NAMES[part]}.{parameter}"
    return f"{_CHECKPOINT_NAMES[module]}.{parameter}"


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of one pipeline stage; earlier stages take one more where they do not divide."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def token_mask(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Bool [batch, length]: true where a row of ``lengths`` tokens has a token."""
    return torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)


def pool(hidden: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
    """One vector for each row: [batch, length, hidden] → [batch, hidden].

    Args:
        hidden: the encoder's output.
        lengths: tokens of each row, int64 [batch].
        how: ``"mean"`` or ``"max"`` over the tokens, or ``"cls"``, the first token's.
    """
    if how == "cls":
        return hidden[:, 0]
    mask = token_mask(lengths, hidden.shape[1]).unsqueeze(-1)
    if how == "max":
        return hidden.masked_fill(~mask, float("-inf")).amax(dim=1)
    return (hidden * mask).sum(dim=1) / lengths.unsqueeze(1)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
