"""Small BERT models with random weights, saved as sentence-transformers folders."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "fast", "##s", "##ing", "blue"]
VOCABULARY = SPECIAL + WORDS + list(string.ascii_lowercase) + [f"##{c}" for c in "aeiourst"]

SENTENCES = [
    "The cat sat on the mat.",
    "a dog ran fast",
    "",
    "Blue cats sitting on a blue mat ran as fast as the dogs ran on a mat on a mat",
    "x",
    "the the the the the",
    "  the cat  sat\ton the\nmat ",
]


def make_model(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 3,
    hidden: int = 24,
    intermediate: int = 37,
    vocabulary: int = len(VOCABULARY),
    positions: int = 32,
    max_seq_length: int | None = 16,
    activation: str = "gelu",
    pooling: str = "mean",
    normalize: bool = True,
    shards: str = "5GB",
    **config: Any,
) -> Path:
    """Save a random model; no size is divisible by any other more than it must be."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    model = BertModel(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=positions,
            hidden_act=activation,
            initializer_range=0.3,
            **config,
        ),
        add_pooling_layer=False,
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "LayerNorm.weight" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    _save_tokenizer(folder)
    kinds = ["Transformer", "Pooling", "Normalize"][: 2 + normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    save_json(folder / "modules.json", modules)
    if max_seq_length is not None:
        save_json(
            folder / "sentence_bert_config.json",
            {"max_seq_length": max_seq_length, "do_lower_case": False},
        )
    (folder / "1_Pooling").mkdir()
    save_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
            "pooling_mode_mean_sqrt_len_tokens": pooling == "mean_sqrt_len_tokens",
        },
    )
    return folder


def reference(folder: Path, lines: Sequence[str]) -> np.ndarray:
    """The embeddings that sentence-transformers computes in this process."""
    from sentence_transformers import SentenceTransformer

    how = {"dtype": torch.float32}
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs=how)
    return model.encode(list(lines), show_progress_bar=False)


def save_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def edit(path: Path, **changes: Any) -> None:
    save_json(path, json.loads(path.read_text()) | changes)


def _save_tokenizer(folder: Path) -> None:
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": 12,
            **{f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")},
        },
    )
