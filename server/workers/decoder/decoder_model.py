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
    from collections.abc import Callable

    from coordinator import GroupCoordinator

    from .decoder_config import DecoderFolder, LlamaConfig
    from .step_arrangement import StepArrangement

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
