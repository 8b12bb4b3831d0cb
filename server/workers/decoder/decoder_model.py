"""Compute one pipeline stage of a Llama-type decoder for the tokens of one step.

The tokens of all sequences are concatenated, ``[tokens, hidden]``; only attention combines tokens,
within a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from coordinator import GroupCoordinator

from ..parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint_name,
    read_parameters,
    whole_parameters,
)
from .decoder_cache import KVCache, ScheduledSequence
from .decoder_folder import DecoderFolder, LlamaConfig


class RotaryTable:
    """Factors of the rotary embedding for each position.

    Attributes:
        cos: [length, 1, head_size].
        sin: the same, with the sign of each half of a head.
    """

    def __init__(
        self, config: LlamaConfig, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = config.head_size
        evens = torch.arange(0, size, 2, dtype=torch.int64, device=device).float()
        places = torch.arange(length, device=device)[:, None, None].float()
        angles = places * (1.0 / config.rope_base ** (evens / size))
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.cos, self.sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class StepArrangement(Protocol):
    """Positions of a step's tokens, computed once for all layers.

    Attributes:
        cos, sin: of the rotary embedding, [tokens, 1, head_size].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write keys and values to the cache; return each token's causal attention.

        Args:
            layer: layer in the cache.
            asked: query heads of each key head, [tokens, key_heads, queries, head_size].
            new: keys and then values of the heads, [tokens, 2 * key_heads, head_size].

        Returns:
            The shape of ``asked``.
        """


class RowsArrangement:
    """Arrangement of any step; the cache must have room for its rows.

    Attributes:
        tokens: token ids, int64 [tokens].
        ends: indexes of tokens after which a token is drawn, int64 [draws].
        cos, sin: see `StepArrangement`.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledSequence],
        config: LlamaConfig,
        rotary: RotaryTable,
        cache: KVCache,
    ) -> None:
        device = rotary.cos.device
        self._cache = cache
        self._counts = [len(row.tokens) for row in rows]
        self._masks = [_causal(row, config.queries_of_key, device) for row in rows]
        tokens = [token for row in rows for token in row.tokens]
        slots = [row.slot for row in rows for _ in row.tokens]
        places = [place for row in rows for place in range(row.start, row.stop)]
        stops = accumulate(self._counts)
        ends = [stop - 1 for row, stop in zip(rows, stops, strict=True) if row.draw]
        # One copy, since a copy to a device waits for the device.
        numbers = torch.tensor([*tokens, *slots, *places, *ends], device=device)
        sizes = [len(tokens), len(slots), len(places), len(ends)]
        self.tokens, self._slots, self._places, self.ends = torch.split(numbers, sizes)
        self._held = list(zip(*map(cache.held, rows), strict=True))
        self.cos, self.sin = rotary.cos[self._places], rotary.sin[self._places]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        # The query heads of a key head are computed as further tokens.
        by_row = torch.split(asked.transpose(0, 1).unsqueeze(0), self._counts, dim=2)
        parts = zip(by_row, self._held[layer], self._masks, strict=True)
        attended = [
            functional.scaled_dot_product_attention(
                part.flatten(2, 3), keys, values, attn_mask=mask
            )
            for part, (keys, values), mask in parts
        ]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        return torch.unflatten(joined[0], 1, (len(asked), -1)).transpose(0, 1)


class FixedArrangement:
    """Arrangement of one token per row, with fixed shapes and addresses for CUDA graphs.

    Attributes:
        tokens: token ids, int64 [size].
        cos, sin: see `StepArrangement`.

    Args:
        size: maximum rows of a step; the last row fills unused places.
        reach: maximum tokens of a sequence.
        rotary: factors of the model.
        cache: has finite numbers everywhere.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: int, reach: int, rotary: RotaryTable, cache: KVCache) -> None:
        device = rotary.cos.device
        self._rotary, self._cache, self._reach = rotary, cache, reach
        self._numbers = torch.zeros((3, size), dtype=torch.int64, device=device)
        self.tokens, self._slots, self._places = self._numbers
        self._every = torch.arange(reach, device=device)

    def fill(self, rows: Sequence[ScheduledSequence]) -> None:
        """Copy the rows of a step to the fixed addresses."""
        lacking = self._numbers.shape[1] - len(rows)
        padded = [*rows, *[rows[-1]] * lacking]
        numbers = [[row.tokens[0] for row in padded], [row.slot for row in padded]]
        self._numbers.copy_(torch.tensor([*numbers, [row.start for row in padded]]))

    def prepare(self) -> None:
        """Compute factors and mask from the rows, for all layers."""
        self.cos, self.sin = self._rotary.cos[self._places], self._rotary.sin[self._places]
        self._mask = (self._every <= self._places[:, None])[:, None, None]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        keys, values = self._cache.gathered(layer, self._slots, self._reach)
        return functional.scaled_dot_product_attention(asked, keys, values, attn_mask=self._mask)


def _causal(row: ScheduledSequence, queries: int, device: torch.device) -> torch.Tensor | None:
    """Return the mask of each query of each token of a row; ``None``: one token sees all."""
    if len(row.tokens) == 1:
        return None
    every = torch.arange(row.stop, device=device)
    return every <= every[row.start :].repeat_interleave(queries)[:, None]


_CHECKPOINT_NAMES = {
    "words": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attended_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "fed_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class DecoderLayer(nn.Module):
    """Decoder layer, with this rank's attention heads and part of the feed-forward network.

    [tokens, hidden] → the same. Collective: yes, every member of ``tp``; two all-reduces.
    """

    def __init__(self, config: LlamaConfig, tp: GroupCoordinator) -> None:
        super().__init__()
        size, inner, head = config.hidden_size, config.intermediate_size, config.head_size
        heads = config.heads(tp.world_size)
        queries, keys = heads.query_sizes(head), heads.key_sizes(head)
        self.head_size, self.key_heads = head, heads.keys[tp.rank_in_group]
        self.attended_norm = nn.RMSNorm(size, config.rms_norm_eps, device="meta")
        self.query = ColumnParallelLinear(size, sum(queries), tp, bias=False, sizes=queries)
        self.key = ColumnParallelLinear(size, sum(keys), tp, bias=False, sizes=keys)
        self.value = ColumnParallelLinear(size, sum(keys), tp, bias=False, sizes=keys)
        self.out = RowParallelLinear(sum(queries), size, tp, bias=False, sizes=queries)
        self.fed_norm = nn.RMSNorm(size, config.rms_norm_eps, device="meta")
        self.gate = ColumnParallelLinear(size, inner, tp, bias=False)
        self.up = ColumnParallelLinear(size, inner, tp, bias=False)
        self.down = RowParallelLinear(inner, size, tp, bias=False)

    def prepare(self) -> None:
        """Merge the loaded weights that `forward` uses together."""
        self.attending = MergedColumnParallelLinear((self.query, self.key, self.value))
        self.feeding = MergedColumnParallelLinear((self.gate, self.up))
        del self.query, self.key, self.value, self.gate, self.up

    def forward(self, x: torch.Tensor, step: StepArrangement, layer: int) -> torch.Tensor:
        """Compute the layer; ``layer``: its number in the cache."""
        x = x + self.out(self._attend(self.attending(self.attended_norm(x)), step, layer))
        gate, up = self.feeding(self.fed_norm(x)).chunk(2, dim=1)
        fed: torch.Tensor = self.down(functional.silu(gate) * up)
        return x + fed

    def _attend(self, projected: torch.Tensor, step: StepArrangement, layer: int) -> torch.Tensor:
        heads = projected.view(len(projected), -1, self.head_size)
        turning = heads[:, : -self.key_heads]  # queries and keys
        halves_swapped = turning.roll(self.head_size // 2, dims=-1)
        turning.mul_(step.cos).addcmul_(halves_swapped, step.sin)
        queries, new = heads[:, : -2 * self.key_heads], heads[:, -2 * self.key_heads :]
        asked = torch.unflatten(queries, 1, (self.key_heads, -1))
        return step.attend(layer, asked, new).reshape(len(projected), -1)


class DecoderStage(nn.Module):
    """Layers of one pipeline stage.

    Args:
        config: sizes of the decoder.
        layers: layers of this stage, numbered as in the whole decoder.
        tp: group over which every layer is sharded.
    """

    def __init__(self, config: LlamaConfig, layers: range, tp: GroupCoordinator) -> None:
        super().__init__()
        size, vocabulary = config.hidden_size, config.vocab_size
        is_last = layers.stop == config.num_hidden_layers
        self.words = VocabParallelEmbedding(vocabulary, size, tp) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, tp) for index in layers})
        self.norm = nn.RMSNorm(size, config.rms_norm_eps, device="meta") if is_last else None
        self.head = ColumnParallelLinear(size, vocabulary, tp, bias=False) if is_last else None

    def forward(self, x: torch.Tensor, step: StepArrangement) -> torch.Tensor:
        """Compute this stage's layers for the tokens of a step.

        Args:
            x: token ids int64 [tokens] on the first stage, otherwise the previous stage's result.
            step: arrangement of the tokens.

        Returns:
            [tokens, hidden], equal on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        if self.words is not None:
            x = self.words(x)
        for number, layer in enumerate(self.layers.values()):
            x = layer(x, step, number)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the logits, padded; only on the last stage.

        Raises:
            TypeError: another stage.
        """
        if self.norm is None or self.head is None:
            raise TypeError("only the last stage has logits")
        part: torch.Tensor = self.head(self.norm(hidden))
        return part


def load_decoder(
    folder: DecoderFolder,
    layers: range,
    tp: GroupCoordinator,
    device: torch.device,
    report: Callable[[int, int, str], None],
    dtype: torch.dtype,
) -> DecoderStage:
    """Make a stage, and read this rank's part of its parameters as ``dtype``.

    Raises:
        CheckpointError: the weights differ from the folder's config.json.
    """
    stage = DecoderStage(folder.config, layers, tp)
    whole = whole_parameters(stage)
    names = {name: checkpoint_name(name, "model.layers", _CHECKPOINT_NAMES) for name in whole}
    tied = folder.config.tie_word_embeddings and stage.head is not None
    if tied and stage.words is not None:
        del whole["head.weight"]
    elif tied:
        names["head.weight"] = f"{_CHECKPOINT_NAMES['words']}.weight"
    tensors = read_parameters(
        folder.path, whole, names, tp, device=device, dtype=dtype, report=report
    )
    if tied and stage.words is not None:
        tensors["head.weight"] = tensors["words.weight"]
    stage.load_state_dict(tensors, assign=True)
    for module in stage.modules():
        if isinstance(module, DecoderLayer):
            module.prepare()
    return stage.eval().requires_grad_(False)
