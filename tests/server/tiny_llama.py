"""Small decoders with random weights, and what transformers makes of them.

It is loaded where it is used: every process of the tests reads this file.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPTS = [[5, 9, 2, 77, 31], [8], list(range(3, 40)), [50, 50, 50]]
ENDS = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_llama(folder: Path, **changes: Any) -> Path:
    """3 layers, 6 query heads and 3 key-value heads, an odd vocabulary and feed-forward size.

    Its tokens are the 256 bytes and one that ends answers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "intermediate_size": 41,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
        # Large enough for the logits to differ clearly.
        "initializer_range": 0.4,
    }
    LlamaForCausalLM(LlamaConfig(**settings | changes)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([ENDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that transformers finds, the one that ends the answer among them."""
    return list(_greedy(folder, tuple(prompt), count))


@cache
def _greedy(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = reference(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(int(token) for token in found[0, len(prompt) :])
