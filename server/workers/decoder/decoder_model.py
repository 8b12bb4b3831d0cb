"""One pipeline stage of a Llama-type decoder: words on the first, some layers on each, the
vocabulary's logits on the last.

The tokens of all sequences of a step are concatenated, ``[tokens, hidden]``; only attention
combines tokens, and only those of the same sequence.
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

    from .decoder_config import DecoderFolder, LlamaConfig
    from .kv_cache import KVCache, Row

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


class StepArrangement:
    """How the tokens of a step stand, computed once for all layers.

    Attributes:
        rows: the sequences' parts.
        spans: where each row's tokens are among those of the step.
        masks: which tokens of its sequence each token of a row sees, bool [tokens, row.stop];
            ``None`` for a row of one token, which sees all.
        cos, sin: of the rotary embedding, [tokens, 1, head_size].

    Args:
        rows: the sequences' parts.
        config: the decoder's sizes.
        like: of the dtype and on the device of the model.
    """

    def __init__(self, rows: Sequence[Row], config: LlamaConfig, like: torch.Tensor) -> None:
        self.rows = rows
        stops = torch.tensor([len(row.tokens) for row in rows]).cumsum(0).tolist()
        self.spans = [
            slice(stop - len(r.tokens), stop) for r, stop in zip(rows, stops, strict=True)
        ]
        self.masks = [_causal(row, like.device) for row in rows]
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows]).to(like.device)
        size = config.head_size
        evens = torch.arange(0, size, 2, dtype=torch.int64, device=like.device).float()
        angles = positions[:, None].float() * (1.0 / config.rope_base ** (evens / size))
        angles = torch.cat((angles, angles), dim=1)[:, None]
        self.cos, self.sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)


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
        parts = (self.query, self.key, self.value)
        self.sizes = [len(part.weight) for part in parts]
        self.attending = MergedColumnParallelLinear(parts)
        self.feeding = MergedColumnParallelLinear((self.gate, self.up))
        del self.query, self.key, self.value, self.gate, self.up

    def forward(
        self, x: torch.Tensor, step: StepArrangement, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """``layer``: the number of this layer in ``cache``."""
        x = x + self.out(self._attend(self.attending(self.attended_norm(x)), step, cache, layer))
        gate, up = self.feeding(self.fed_norm(x)).chunk(2, dim=1)
        fed: torch.Tensor = self.down(functional.silu(gate) * up)
        return x + fed

    def _attend(
        self, projected: torch.Tensor, step: StepArrangement, cache: KVCache, layer: int
    ) -> torch.Tensor:
        parts = [
            part.view(len(part), -1, self.head_size)
            for part in torch.split(projected, self.sizes, dim=1)
        ]
        query, key = (_rotated(part, step.cos, step.sin).transpose(0, 1) for part in parts[:2])
        value = parts[2].transpose(0, 1)
        found = []
        for row, span, mask in zip(step.rows, step.spans, step.masks, strict=True):
            keys, values = cache.put(layer, row, key[:, span], value[:, span])
            # The query heads of a key head are computed as further tokens of it.
            asked = query[:, span].reshape(self.key_heads, -1, self.head_size)
            seen = None if mask is None else mask.repeat(asked.shape[1] // len(mask), 1)
            got = functional.scaled_dot_product_attention(
                asked[None], keys[None], values[None], attn_mask=seen
            )
            got = got.reshape(-1, len(row.tokens), self.head_size).transpose(0, 1)
            found.append(got.flatten(1))
        return found[0] if len(found) == 1 else torch.cat(found)


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

    def forward(self, x: torch.Tensor, step: StepArrangement, cache: KVCache) -> torch.Tensor:
        """Run this stage's layers on the tokens of a step.

        Args:
            x: token ids int64 [tokens] on the first stage; otherwise what the stage before
                returned.
            step: how the tokens stand.
            cache: has room for them.

        Returns:
            [tokens, hidden], the same on every rank of the stage.

        Collective: yes, every member of the tensor-parallel group.
        """
        if self.words is not None:
            x = self.words(x)
        for number, layer in enumerate(self.layers.values()):
            x = layer(x, step, cache, number)
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


def _causal(row: Row, device: torch.device) -> torch.Tensor | None:
    if len(row.tokens) == 1:
        return None
    every = torch.arange(row.stop, device=device)
    return every <= every[row.start :, None]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of ``x`` [tokens, heads, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
