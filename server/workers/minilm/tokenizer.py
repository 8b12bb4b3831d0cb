"""Turns texts into token ids by the model's tokenizer.json: in the driver, once for all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model_config import ModelFolder


class InputTooLongError(ValueError):
    """An input is longer than the model takes, and was not to be truncated.

    Attributes:
        index: the number of the input in its request.
        length: how long it is.
        limit: how long it may be.
        unit: of both: ``"tokens"`` or ``"characters"``.
    """

    def __init__(self, index: int, length: int, limit: int, unit: str) -> None:
        self.index = index
        self.length = length
        self.limit = limit
        self.unit = unit
        super().__init__(
            f"input {index} has {length} {unit}; the model takes at most {limit}, and truncation "
            "was not asked for"
        )


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Inputs as tokens.

    Attributes:
        tokens: int32 [length] for each input, special tokens included.
        truncated: the numbers of the inputs that were cut.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)


class SentenceTokenizer:
    """The tokenizer of a model folder.

    Attributes:
        max_characters: how much of a text is looked at. No more characters fit into the tokens that
            the model takes, so that a longer text costs no more than these tokens do.

    Args:
        folder: the model.

    Raises:
        ImportError: the tokenizers package is not installed.
        ValueError: tokenizer.json is not one.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._tokenizer = _load(folder)
        self._special = self._tokenizer.num_special_tokens_to_add(False)
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.max_characters = folder.max_length * longest

    def encode(
        self, inputs: Sequence[str | Sequence[int]], *, truncate: bool, first: int = 0
    ) -> EncodedText:
        """The tokens of each input: a text, or token ids with the special ones among them.

        Args:
            inputs: what to encode.
            truncate: cut what is longer than the model takes, but for the last special token.
            first: what errors and `EncodedText.truncated` call the first input.

        Raises:
            TypeError, ValueError: see `ModelFolder.check_inputs`; or a text is not Unicode.
            InputTooLongError: an input is too long, and ``truncate`` is false.
        """
        self._folder.check_inputs(inputs, first)
        cut = [self._cut(first + at, item, truncate) for at, item in enumerate(inputs)]
        texts = [item for item in cut if isinstance(item, str)]
        encodings = iter(self._tokenizer.encode_batch_fast(texts))
        found = EncodedText()
        for index, (given, item) in enumerate(zip(inputs, cut, strict=True), first):
            tokens, length = item, len(item)
            if isinstance(item, str):
                encoding = next(encodings)
                tokens = encoding.ids
                length = len(tokens) + sum(
                    len(more.ids) - self._special for more in encoding.overflowing
                )
            if length > self._folder.max_length and not truncate:
                raise InputTooLongError(index, length, self._folder.max_length, "tokens")
            if length > self._folder.max_length or len(item) < len(given):
                found.truncated.append(index)
            found.tokens.append(np.array(tokens, np.int32))
        return found

    def _cut(self, index: int, item: str | Sequence[int], truncate: bool) -> str | Sequence[int]:
        """The part of an input that is looked at."""
        limit = self._folder.max_length
        if not isinstance(item, str):
            return [*item[: limit - 1], item[-1]] if truncate and len(item) > limit else item
        if len(item) > self.max_characters and not truncate:
            raise InputTooLongError(index, len(item), self.max_characters, "characters")
        return item[: self.max_characters]


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
