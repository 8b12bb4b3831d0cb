"""Compute one pipeline stage of a Llama-type decoder, for the tokens of one step.

The tokens of all sequences of a step are concatenated, ``[tokens, hidden]``; only attention
combines tokens, and only those of the same sequence.
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
from .decoder_config import DecoderFolder, LlamaConfig


class RotaryTable:
    """The factors of the rotary embedding, of each place in a sequence.

    Attributes:
        cos: [length, 1, head_size].
        sin: the same, with the sign that each half of a head needs.

    Args:
        config: the decoder's sizes.
        length: of a sequence at most.
        dtype: of the factors.
        device: where they lie.
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
    """How the tokens of a step stand, computed once for all layers.

    Attributes:
        cos, sin: of the rotary embedding, [tokens, 1, head_size].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What each token's queries find in its sequence, up to the token itself.

        Args:
            layer: its number in the cache.
            asked: the query heads of each key head, [tokens, key_heads, queries, head_size].
            new: the heads' keys and then their values, which are put into the cache;
                [tokens, 2 * key_heads, head_size].

        Returns:
            The shape of ``asked``.
        """


class RowsArrangement:
    """Of any step.

    Attributes:
        tokens: their ids, int64 [tokens].
        ends: the tokens after which another one is drawn, int64 [draws].
        cos, sin: see `StepArrangement`.

    Args:
        rows: the sequences' parts.
        config: the decoder's sizes.
        rotary: of the model.
        cache: has room for the rows.
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
        # A copy to a device waits for the device: so it is one.
        numbers = torch.tensor([*tokens, *slots, *places, *ends], device=device)
        sizes = [len(tokens), len(slots), len(places), len(ends)]
        self.tokens, self._slots, self._places, self.ends = torch.split(numbers, sizes)
        self._held = list(zip(*map(cache.held, rows), strict=True))
        self.cos, self.sin = rotary.cos[self._places], rotary.sin[self._places]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        # The query heads of a key head are computed as further tokens of it.
        by_row = torch.split(asked.transpose(0, 1).unsqueeze(0), self._counts, dim=2)
        parts = zip(by_row, self._held[layer], self._masks, strict=True)
        found = [
            functional.scaled_dot_product_attention(
                part.flatten(2, 3), keys, values, attn_mask=mask
            )
            for part, (keys, values), mask in parts
        ]
        got = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return torch.unflatten(got[0], 1, (len(asked), -1)).transpose(0, 1)


class FixedArrangement:
    """Of steps in which every row has one token. Its shapes and addresses stay the same, so what is
    computed with it can be a CUDA graph.

    Attributes:
        tokens: their ids, int64 [size].
        cos, sin: see `StepArrangement`.

    Args:
        size: rows of a step at most; in the place of those that it lacks, its last one is repeated.
        reach: tokens of a sequence at most.
        rotary: of the model.
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
        """Take the rows of a step."""
        lacking = self._numbers.shape[1] - len(rows)
        padded = [*rows, *[rows[-1]] * lacking]
        numbers = [[row.tokens[0] for row in padded], [row.slot for row in padded]]
        self._numbers.copy_(torch.tensor([*numbers, [row.start for row in padded]]))

    def prepare(self) -> None:
        """Compute what follows from the rows, for all layers."""
        self.cos, self.sin = self._rotary.cos[self._places], self._rotary.sin[self._places]
        self._seen = (self._every <= self._places[:, None])[:, None, None]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        keys, values = self._cache.gathered(layer, self._slots, self._reach)
        return functional.scaled_dot_product_attention(asked, keys, values, attn_mask=self._seen)


def _causal(row: ScheduledSequence, queries: int, device: torch.device) -> torch.Tensor | None:
    """Which tokens of its sequence are seen by each of the ``queries`` of every token of a row;
    ``None``: all, since it has one token.
    """
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
    """One layer, this rank's attention heads and part of the feed-forward network.

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
        """Merge what `forward` computes as one, once the parameters are there."""
        self.attending = MergedColumnParallelLinear((self.query, self.key, self.value))
        self.feeding = MergedColumnParallelLinear((self.gate, self.up))
        del self.query, self.key, self.value, self.gate, self.up

    def forward(self, x: torch.Tensor, step: StepArrangement, layer: int) -> torch.Tensor:
        """``layer``: the number of this layer in the cache."""
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
    """What one pipeline stage computes.

    Args:
        config: the decoder's sizes.
        layers: the layers of this stage, numbered as in the whole decoder.
        tp: the group that every layer is cut over.
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
        """Run this stage's layers on the tokens of a step.

        Args:
            x: token ids int64 [tokens] on the first stage; otherwise what the stage before
                returned.
            step: how the tokens stand.

        Returns:
            [tokens, hidden], the same on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        if self.words is not None:
            x = self.words(x)
        for number, layer in enumerate(self.layers.values()):
            x = layer(x, step, number)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary's logits, padded; on the last stage. Collective: no.

        Raises:
            TypeError: this is not the last stage.
        """
        if self.norm is None or self.head is None:
            raise TypeError("only the last stage has logits")
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def load_decoder(
    folder: DecoderFolder,
    layers: range,
    tp: GroupCoordinator,
    device: torch.device,
    report: Callable[[int, int, str], None],
    dtype: torch.dtype,
) -> DecoderStage:
    """Make a stage and read this rank's part of its parameters, as ``dtype``.

    Raises:
        CheckpointError: the weights are not those that the folder's config.json describes.

    Collective: no.
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
