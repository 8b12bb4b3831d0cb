"""The decoder's arithmetic, its ranks as threads, against transformers in one piece."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from server.workers.decoder import decoder_worker
from server.workers.decoder.decoder_cache import (
    CacheLostError,
    SampleRequest,
    Sampling,
    ScheduledSequence,
    choose,
)
from server.workers.decoder.decoder_folder import (
    DecoderFolder,
    DecoderFolderError,
    is_decoder,
    made_once,
)
from server.workers.decoder.decoder_model import FixedArrangement
from server.workers.decoder.decoder_worker import DecoderWorker
from tests.server.fake_groups import run_threads
from tests.server.tiny_bert import edit
from tests.server.tiny_llama import PROMPTS, greedy, make_llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GREEDY = SampleRequest(Sampling(), 0.0)
COUNT = 20


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Path:
    return copytree(llama, tmp_path / "model")


def steps_of(answers: Sequence[Sequence[int]], chunk: int) -> list[list[ScheduledSequence]]:
    """Steps in which each sequence of `PROMPTS` begins two steps after the one before, and
    is fed ``chunk`` tokens at a time until its prompt ends, then one of its answer at a time.
    """
    steps: list[list[ScheduledSequence]] = []
    for slot, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        at = 2 * slot
        starts = [*range(0, len(prompt), chunk), *range(len(prompt), len(prompt) + len(answer) - 1)]
        for start, stop in zip(starts, [*starts[1:], len(prompt) + len(answer) - 1], strict=True):
            steps += [[] for _ in range(at + 1 - len(steps))]
            draw = None if stop < len(prompt) else GREEDY
            steps[at].append(
                ScheduledSequence(slot, slot, start, [*prompt, *answer][start:stop], draw)
            )
            at += 1
    return steps


def drawn(
    folder: Path, tp: int, pp: int, steps: list[list[ScheduledSequence]], **options: Any
) -> dict[int, Any]:
    """What the last stage draws for each slot."""

    def body(context: Any) -> list[Any]:
        worker = DecoderWorker(context, folder, slots=len(PROMPTS), length=128, **options)
        return [worker.step(rows) for rows in steps]

    results = run_threads(tp, pp, body)
    assert all(found is None for found in results[0]) == (tp * pp > tp)
    found: dict[int, list[int]] = {}
    for rows, tokens in zip(steps, results[tp * (pp - 1)], strict=True):
        for row, token in zip([row for row in rows if row.draw], tokens, strict=True):
            found.setdefault(row.slot, []).append(token)
    return found


@pytest.mark.parametrize(("tp", "pp", "chunk"), [(1, 1, 7), (2, 1, 100), (2, 2, 7), (3, 3, 100)])
def test_tokens_are_those_of_transformers(llama: Path, tp: int, pp: int, chunk: int) -> None:
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    found = drawn(llama, tp, pp, steps_of(expected, chunk))
    assert found == dict(enumerate(expected))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6, "num_attention_heads": 6},
        {"head_dim": None, "rms_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 100.0}},
        {"vocab_size": 258, "num_key_value_heads": 2},
    ],
    ids=str,
)
def test_other_decoders_give_their_tokens(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_llama(tmp_path / "model", **changes)
    expected = [greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    for tp, pp in [(2, 1), (1, 3)]:
        assert drawn(folder, tp, pp, steps_of(expected, 11)) == dict(enumerate(expected))


@pytest.mark.parametrize(("tp", "pp", "chunk"), [(1, 1, 1), (2, 1, 1), (2, 2, 100)])
def test_steps_of_fixed_shapes_find_the_same_tokens(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, chunk: int
) -> None:
    """Those that are CUDA graphs elsewhere: of 1, 2 or 4 sequences of up to 8, 16, 32 … tokens."""
    monkeypatch.setattr(decoder_worker, "_LEAST_REACH", 8)
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    found = drawn(llama, tp, pp, steps_of(expected, chunk), graphs=True)
    assert found == dict(enumerate(expected))


def test_steps_of_fixed_shapes_see_nothing_that_an_ended_group_left(llama: Path) -> None:
    """Its last replay may have put NaN into the cache."""
    expected = greedy(llama, PROMPTS[0], COUNT)

    def body(context: Any) -> Any:
        worker = DecoderWorker(context, llama, slots=2, length=128, graphs=True)
        worker._cache._cells.fill_(math.nan)
        worker.restore(context)
        tokens: Any = worker.step([ScheduledSequence(0, 0, 0, PROMPTS[0], GREEDY)])
        while len(tokens) < COUNT:
            start = len(PROMPTS[0]) + len(tokens) - 1
            tokens += worker.step([ScheduledSequence(0, 0, start, tokens[-1:], GREEDY)])
        return tokens

    assert run_threads(1, 1, body)[0] == expected


@pytest.mark.parametrize(
    ("rows", "stop", "expected"),
    [(1, 1, (1, 8)), (2, 8, (2, 8)), (3, 9, (4, 16)), (5, 100, (5, 100)), (4, 65, (4, 100))],
)
def test_a_step_takes_the_smallest_shape_that_it_fits(
    llama: Path, monkeypatch: pytest.MonkeyPatch, rows: int, stop: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(decoder_worker, "_LEAST_REACH", 8)
    made: list[tuple[int, int]] = []

    class Noted(FixedArrangement):
        def __init__(self, size: int, reach: int, *others: Any) -> None:
            made.append((size, reach))
            super().__init__(size, reach, *others)

    monkeypatch.setattr(decoder_worker, "FixedArrangement", Noted)

    def body(context: Any) -> None:
        worker = DecoderWorker(context, llama, slots=5, length=100, graphs=True)
        if stop > 1:
            worker.step(
                [ScheduledSequence(slot, slot, 0, [7] * (stop - 1), None) for slot in range(rows)]
            )
        for _ in range(2):
            worker._graphs.run(
                [ScheduledSequence(slot, slot, stop - 1, [7], GREEDY) for slot in range(rows)], None
            )

    run_threads(1, 1, body)
    assert made[-1:] == [expected]
    assert len(made) == len(set(made))


class Operators(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operator.name()] += 1
        return operator(*args, **kwargs or {})


def operators(folder: Path, rows: int, draw: SampleRequest = GREEDY) -> Counter[str]:
    """Those of a step that computes the next token of some answers."""

    def body(context: Any) -> Counter[str]:
        worker = DecoderWorker(context, folder, slots=rows, length=128)
        worker.step([ScheduledSequence(slot, slot, 0, PROMPTS[0], draw) for slot in range(rows)])
        with Operators() as found:
            worker.step(
                [ScheduledSequence(slot, slot, len(PROMPTS[0]), [7], draw) for slot in range(rows)]
            )
        return found.counts

    return run_threads(1, 1, body)[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.9, top_k=50)], ids=str)
def test_a_step_gives_the_device_its_numbers_at_once(llama: Path, sampling: Sampling) -> None:
    """And asks it once: whoever copies to or from a device waits for it."""
    counts = operators(llama, 3, SampleRequest(sampling, 0.5))
    assert counts["aten::lift_fresh"] == 1  # what lists become
    assert counts["aten::_local_scalar_dense"] == 0  # what numbers of tensors are read by
    assert counts["aten::_to_copy"] <= (sampling.temperature > 0) * 3


def test_a_further_answer_costs_only_its_attention(llama: Path, tmp_path: Path) -> None:
    shallow = make_llama(tmp_path / "shallow", num_hidden_layers=2)
    one, two, three = (
        sum(operators(llama, rows).values()) - sum(operators(shallow, rows).values())
        for rows in (1, 2, 3)
    )
    assert one <= 30 + 8  # the tests' group takes eight for two sums
    assert three - two == 2


def test_half_precision_draws_nearly_the_same(llama: Path) -> None:
    expected = [greedy(llama, prompt, 4) for prompt in PROMPTS]
    found = drawn(llama, 2, 1, steps_of(expected, 100), dtype="float16")
    same = sum(found[slot][0] == answer[0] for slot, answer in enumerate(expected))
    assert same >= len(PROMPTS) - 1


def test_a_sequence_that_the_cache_lacks_is_named(llama: Path) -> None:
    def body(context: Any) -> Any:
        worker = DecoderWorker(context, llama, slots=2, length=128)
        first = worker.step([ScheduledSequence(7, 0, 0, PROMPTS[0], GREEDY)])
        goes_on = ScheduledSequence(7, 0, 5, [5], GREEDY)
        for wrong in (replace(goes_on, start=4), replace(goes_on, sequence=8)):
            told = f"slot 0 does not hold {wrong.start} tokens of sequence {wrong.sequence}"
            with pytest.raises(CacheLostError, match=told):
                worker.step([ScheduledSequence(9, 1, 0, [5], GREEDY), wrong])
        worker.step([goes_on])
        worker.restore(context)
        with pytest.raises(CacheLostError, match="slot 0 does not hold 6 tokens of sequence 7"):
            worker.step([replace(goes_on, start=6)])
        return first, worker.step([ScheduledSequence(7, 0, 0, PROMPTS[0], GREEDY)])

    first, again = run_threads(2, 2, body)[2]
    assert first == again == greedy(llama, PROMPTS[0], 1)


@pytest.mark.parametrize(
    ("slot", "tokens", "draw"),
    [(2, [5], GREEDY), (-1, [5], GREEDY), (0, [], GREEDY), (0, [1] * 9, None)],
    ids=str,
)
def test_a_row_outside_the_slots_is_refused(llama: Path, slot: int, tokens: Any, draw: Any) -> None:
    def body(context: Any) -> None:
        worker = DecoderWorker(context, llama, slots=2, length=8)
        with pytest.raises(ValueError, match="2 slots of 8 tokens"):
            worker.step([ScheduledSequence(0, slot, 0, tokens, draw)])

    run_threads(1, 1, body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; only 'llama'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the rotary embedding is 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "embedding is 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "biases are not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not supported"),
        ({"head_dim": 7}, "a head has 7 elements"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ],
)
def test_an_unsupported_config_is_refused_by_field(
    edited: Path, changes: dict[str, Any], message: str
) -> None:
    edit(edited / "config.json", **changes)
    with pytest.raises(DecoderFolderError, match=message):
        DecoderFolder.open(edited)


@pytest.mark.parametrize(
    ("given", "ends"),
    [(256, {256}), ([256, 7], {256, 7}), (0, {0}), (None, {256})],
)
def test_the_tokens_that_end_answers_are_the_folders(edited: Path, given: Any, ends: Any) -> None:
    edit(edited / "generation_config.json", eos_token_id=given)
    assert DecoderFolder.open(edited).ends == ends


def test_a_folder_that_is_no_decoder_is_refused(edited: Path) -> None:
    assert is_decoder(edited)
    assert not is_decoder(edited.parent)
    (edited / "tokenizer.json").unlink()
    with pytest.raises(DecoderFolderError, match=r"no tokenizer\.json"):
        DecoderFolder.open(edited)
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        DecoderFolder.open(edited / "none")


# --- The folder in the user's cache that holds a model made once --------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "group-coordinator"


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("whole")


def fail(folder: Path) -> None:
    fill(folder)
    raise ValueError("half of it")


def test_a_cached_model_is_made_once(cache: Path) -> None:
    with pytest.raises(ValueError, match="half of it"):
        made_once("model", fail)
    assert [*cache.iterdir()] == []
    assert (made_once("model", fill) / "weights").read_text() == "whole"
    assert made_once("model", fail) == cache / "model"


def test_another_process_may_make_the_cached_model_first(cache: Path) -> None:
    def fill_late(folder: Path) -> None:
        made_once("model", fill)
        fill(folder)

    made_once("model", fill_late)
    assert [*cache.iterdir()] == [cache / "model"]


def test_a_cache_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match=r"XDG_CACHE_HOME names the folder .*/file/group-"):
        made_once("model", fill)


# --- Sampling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.1, math.nan)),
        ("top_k", -1),
    ],
)
def test_wrong_sampling_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        Sampling(**{field: value})


def test_sampling_draws_by_chance() -> None:
    """Of 4 tokens with chances 0.1, 0.2, 0.3 and 0.4: the likely ones come first."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    numbers = [0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999999]

    def draw(**how: Any) -> list[int]:
        draws = [
            SampleRequest(Sampling(temperature=1.0) if not how else Sampling(**how), n)
            for n in numbers
        ]
        return choose(logits.expand(len(numbers), 4), draws)

    assert draw() == [3, 3, 2, 2, 1, 1, 0, 0]
    assert draw(temperature=0.0) == [3] * 8
    assert draw(temperature=1e-300) == [3] * 8
    assert draw(temperature=1.0, top_k=1) == [3] * 8
    assert draw(temperature=1.0, top_p=1e-9) == [3] * 8
    assert draw(temperature=1.0, top_p=5e-324, top_k=1) == [3] * 8
    assert set(draw(temperature=1.0, top_p=0.5)) == {3, 2}
    assert set(draw(temperature=1.0, top_k=3)) == {3, 2, 1}
    assert set(draw(temperature=1e6)) == {0, 1, 2, 3}
