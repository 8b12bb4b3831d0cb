"""Tokenize prompts and chats, and detokenize answers as they arrive."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .decoder_config import DecoderFolder, DecoderFolderError

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
        from tokenizers import Tokenizer  # noqa: PLC0415

        path = folder.path / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as exc:
            raise DecoderFolderError(f"{path}: not a tokenizer: {exc}") from exc
        self.longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _settings(folder.path)
        self._special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token")}
        self._template = _template(folder.path, settings)

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
        if self._template is None:
            raise ChatError("the model has no chat template")
        from jinja2 import TemplateError  # noqa: PLC0415

        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
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
        """Keep only the last text's tokens, unless they alone decode to nothing."""
        last = self._tokens[self._n_known :]
        if text := self._tokenizer.decode(last):
            self._tokens, self._n_known, self._returned = last, len(last), text

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._tokens)
        return text


def _overlap(text: str, stop: str) -> int:
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise DecoderFolderError(f"{path}: {error}") from error
    if not isinstance(settings, dict):
        raise DecoderFolderError(f"{path}: not an object")
    return settings


def _content(token: Any) -> str:
    """Return a special token's text, which some files wrap."""
    return str(token["content"] if isinstance(token, dict) else token or "")


def _template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the chat template, or ``None``. It is the model's code: it runs in a sandbox."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = (
            each for each in source if isinstance(each, dict) and each.get("name") == "default"
        )
        source = next(named, {}).get("template")
    if not isinstance(source, str):
        return None
    from jinja2 import TemplateError  # noqa: PLC0415
    from jinja2.ext import Extension  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Answers(Extension):
        """Ignore ``{% generation %}``, which only training uses."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Answers]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment.filters["tojson"] = tojson  # jinja2's filter writes "<" as "\\u003c"
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DecoderFolderError(f"{folder}: the chat template: {error}") from error
