"""What the folder of a Llama-type model says about it, checked once, as plain data.

The folder is as transformers writes it: config.json, safetensors, tokenizer.json and, for chats, a
template. Unsupported settings that would change the answer are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..descriptions import PositiveInt, read_description
from ..shares import HeadSplit

if TYPE_CHECKING:
    import os


class DecoderFolderError(ValueError):
    """A folder does not hold a decoder that can be run; the text names the file and the reason."""


class LlamaConfig(msgspec.Struct, frozen=True):
    """``config.json`` of a Llama-type decoder, as far as it changes the answer."""

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """Heads that have a key and a value."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def queries_of_key(self) -> int:
        """Query heads that use the same key head."""
        return self.num_attention_heads // self.key_heads

    @property
    def rope_base(self) -> float:
        """The base of the rotary embedding's wavelengths."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))

    def heads(self, tp: int) -> HeadSplit:
        """How the attention heads are cut over ``tp`` ranks.

        Raises:
            ValueError: there are fewer key-value heads than ranks.
        """
        return HeadSplit.over(self.num_attention_heads, self.key_heads, tp)

    def check_parallel(self, tp: int, pp: int) -> None:
        """Check that the model can be cut so; called by the driver before any process starts.

        Raises:
            ValueError: ``tp`` is not in 1 to the number of key-value heads, or ``pp`` not in 1 to
                the number of layers.
        """
        self.heads(tp)
        if not 1 <= pp <= self.num_hidden_layers:
            raise ValueError(
                f"pp must be 1 to {self.num_hidden_layers}, the model's layers; got {pp}"
            )

    def why_unsupported(self) -> str | None:
        """Why this decoder cannot be run; ``None`` if it can."""
        if self.model_type != "llama":
            return f"model_type is {self.model_type!r}; only 'llama' is supported"
        scaling = self.rope_parameters or self.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            return f"the rotary embedding is {kind!r}; only 'default' is supported"
        if self.hidden_act != "silu":
            return f"hidden_act is {self.hidden_act!r}; only 'silu' is supported"
        if self.attention_bias or self.mlp_bias:
            return "attention_bias or mlp_bias is true; biases are not supported"
        if self.quantization_config is not None:
            return "it has a quantization_config; quantized weights are not supported"
        if self.head_size % 2:
            return (
                f"a head has {self.head_size} elements; the rotary embedding needs an even number"
            )
        return None


@dataclass(frozen=True, slots=True)
class DecoderFolder:
    """A Llama-type model that can be run.

    Attributes:
        path: the folder.
        config: the decoder's sizes.
        ends: tokens that end an answer.
    """

    path: Path
    config: LlamaConfig
    ends: frozenset[int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> DecoderFolder:
        """Read and check a folder's descriptions.

        Raises:
            FileNotFoundError: the folder is not there.
            DecoderFolderError: a description is missing, malformed, or not supported.
        """
        root = Path(path)
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: no such model folder")
        config = read_description(root / "config.json", LlamaConfig, DecoderFolderError)
        if reason := config.why_unsupported():
            raise DecoderFolderError(f"{root / 'config.json'}: {reason}")
        if not (root / "tokenizer.json").is_file():
            raise DecoderFolderError(f"{root}: holds no tokenizer.json")
        ends = config.eos_token_id
        if (root / "generation_config.json").is_file():
            file = root / "generation_config.json"
            named = read_description(file, _Generation, DecoderFolderError).eos_token_id
            ends = ends if named is None else named
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return cls(root, config, frozenset(ids))


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def is_decoder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder's config.json describes a Llama-type decoder, as far as it can be read."""
    try:
        content = (Path(path) / "config.json").read_bytes()
        return msgspec.json.decode(content, type=_Kind).model_type == "llama"
    except (OSError, msgspec.MsgspecError):
        return False


class _Kind(msgspec.Struct):
    model_type: str = ""
