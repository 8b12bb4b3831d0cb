"""Texts to token ids, as the model's own tokenizer.json says, in batches of like lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from server.workers.minilm.config import ModelFolder


class SentenceTokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: the model.

    Raises:
        ImportError: the tokenizers package is not installed.
        ValueError: tokenizer.json is not one.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._tokenizer = _load(folder)

    def encode(self, inputs: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """The token ids of each input, truncated to the model's length, without padding.

        An input that is token ids already is taken as it is.
        """
        texts = [item for item in inputs if isinstance(item, str)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        return [next(encoded).ids if isinstance(item, str) else list(item) for item in inputs]

    def truncates(self, text: str) -> bool:
        """Whether ``text`` is longer than the model takes."""
        return bool(self._tokenizer.encode(text).overflowing)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Some of the inputs, padded to the longest of them.

    Attributes:
        rows: which inputs they are.
        lengths: tokens of each.
        ids: int64 [batch, max(lengths)], 0 beyond a row's length.
    """

    rows: list[int]
    lengths: list[int]
    ids: torch.Tensor


def make_batches(tokens: Sequence[Sequence[int]], size: int) -> Iterator[TokenBatch]:
    """Batches of at most ``size`` inputs, longest first, so that little of them is padding."""
    order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        lengths = [len(tokens[row]) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(tokens[row])] = torch.tensor(tokens[row])
        yield TokenBatch(rows, lengths, ids)


def _load(folder: ModelFolder) -> Any:
    try:
        from tokenizers import Tokenizer, normalizers  # noqa: PLC0415
    except ImportError as exc:
        raise ImportError("embedding text needs the package tokenizers") from exc
    path = folder.weights / "tokenizer.json"
    content = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as exc:
        raise ValueError(f"{path}: not a tokenizer: {exc}") from exc
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=folder.max_length)
    if folder.lower_case:
        steps = [normalizers.Lowercase()]
        steps += [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer
