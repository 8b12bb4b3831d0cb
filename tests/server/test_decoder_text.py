"""Text of a decoder: prompts from chats; answers token by token as the tokenizer decodes all."""

from __future__ import annotations

import json
import random
from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from server.workers.decoder import AnswerReader, DecoderFolder, DecoderText
from tests.server.tiny_bert import edit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.quick

END = "<end>"
WORDS = ["▁", "▁hello", "▁world", "a", "é", "漢", "\ufffd"]


def byte_level() -> Tokenizer:
    """As GPT-2's: a token is a part of a character, or more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({each: number for number, each in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2's: words, and bytes for what they do not have."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {each: number for number, each in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return with_added(tokenizer)


def metaspace() -> Tokenizer:
    """As T5's, and as converters of sentencepiece write them."""
    tokenizer = Tokenizer(BPE({each: number for number, each in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Metaspace()
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


MAKERS = (byte_level, byte_fallback, metaspace)


def ids_of(tokenizer: Any, *names: str) -> list[int]:
    return [tokenizer.token_to_id(name) for name in names]


def read(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    reader = AnswerReader(tokenizer, ())
    return [*map(reader.read, ids), reader.rest()]


@pytest.mark.parametrize("make", MAKERS)
def test_the_pieces_of_any_tokens_are_their_text(make: Any) -> None:
    tokenizer, chance = make(), random.Random(5)
    size = tokenizer.get_vocab_size()
    for _ in range(150):
        some = [chance.randrange(size) for _ in range(4)]  # so that bytes come in runs, and not
        ids = [chance.choice([*some, chance.randrange(size + 2)]) for _ in range(30)]
        assert "".join(read(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", MAKERS)
def test_text_comes_as_soon_as_it_is_certain(make: Any) -> None:
    tokenizer = make()
    first, last = ids_of(tokenizer, "a", "<tool>")
    assert read(tokenizer, [first, first, last, first]) == ["a", "a", "<tool>", "a", ""]


def test_bytes_are_decoded_together() -> None:
    """In a run of bytes that are no text none is, as the library decodes them: not the newline."""
    tokenizer = byte_fallback()
    newline, *duck = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in "\n🦆".encode()))
    hello, world = ids_of(tokenizer, "▁hello", "▁world")
    whole = [hello, newline, *duck, world]
    assert read(tokenizer, whole) == ["hello", "", "", "", "", "", "\n🦆 world", ""]
    broken = [hello, newline, *duck[:2], world]
    assert read(tokenizer, broken) == ["hello", "", "", "", "\ufffd\ufffd\ufffd world", ""]
    assert read(tokenizer, [hello, *duck]) == ["hello", "", "", "", "", "🦆"]


def test_special_tokens_do_not_split_a_character() -> None:
    symbols = [f"<0x{byte:02X}>" for byte in "🦆".encode()]
    for tokenizer, duck in ((byte_level(), "ðŁ¦Ĩ"), (byte_fallback(), symbols)):
        end, *parts = ids_of(tokenizer, END, *duck)
        assert "".join(read(tokenizer, [end, *parts[:2], end, *parts[2:], end])) == "🦆"


def test_a_stop_of_bytes_ends_an_answer_at_once() -> None:
    tokenizer = byte_fallback()
    first, newline, *duck = ids_of(
        tokenizer, "a", "<0x0A>", *(f"<0x{byte:02X}>" for byte in "🦆".encode())
    )
    reader = AnswerReader(tokenizer, ["\n"])
    assert (reader.read(first), reader.read(newline), reader.stopped) == ("a", "", True)
    reader = AnswerReader(tokenizer, ["a🦆"])
    assert [reader.read(token) for token in (first, *duck[:3])] == [""] * 4
    assert not reader.stopped
    assert (reader.read(duck[3]), reader.stopped) == ("", True)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), "one two three"),
        (("two",), "one "),
        (("three", "two"), "one "),
        (("two t",), "one "),
        (("e two threeX", "threeX"), "one two three"),
        (("o",), ""),
        (("🦆",), "one two three"),
    ],
)
def test_stops_are_found_across_tokens(llama: Path, stops: tuple[str, ...], expected: str) -> None:
    text = DecoderText(DecoderFolder.open(llama))
    reader = text.reader(stops)
    said = "".join(map(reader.read, text.encode("one two three"))) + reader.rest()
    assert said == expected
    assert reader.stopped == (expected != "one two three")


@pytest.mark.parametrize("kept", ["chat_template.jinja", "text", "by name"])
def test_the_template_of_a_chat_is_found(llama: Path, tmp_path: Path, kept: str) -> None:
    folder = copytree(llama, tmp_path / "model")
    template = "{{ messages | tojson }}{% if add_generation_prompt %}:{% endif %}"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
    if kept == "chat_template.jinja":
        (folder / kept).write_text(template)
    else:
        (folder / "chat_template.jinja").unlink()
        inside = {"chat_template": template if kept == "text" else named}
        (folder / "tokenizer_config.json").write_text(json.dumps(inside))
    text = DecoderText(DecoderFolder.open(folder))
    ids = text.encode_chat([{"role": "user", "content": "<b> & 'é'"}])
    assert ids == text.encode("""[{"role": "user", "content": "<b> & 'é'"}]:""")


def test_a_wrong_tokenizer_or_template_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = copytree(llama, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template: Expected an expression"):
        DecoderText(DecoderFolder.open(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}!"}')
    edit(folder / "tokenizer_config.json", bos_token={"__type": "AddedToken", "content": "<end>"})
    text = DecoderText(DecoderFolder.open(folder))
    assert text.encode_chat([{"role": "user", "content": "hi"}])[0] == 256
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="tokenizer or chat template: "):
        DecoderText(DecoderFolder.open(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer or chat template: "):
        DecoderText(DecoderFolder.open(folder))
