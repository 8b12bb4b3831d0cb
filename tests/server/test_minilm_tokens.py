"""From texts to batches of tokens: what is too long, and how tokens are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.workers.minilm import InputTooLongError, ModelFolder, SentenceTokenizer
from server.workers.minilm.minilm_worker import arrange, make_batches
from tests.server.tiny_bert import make_model

if TYPE_CHECKING:
    from pathlib import Path

CLS, SEP, CAT = 2, 3, 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentenceTokenizer:
    folder: Path = make_model(tmp_path_factory.mktemp("model") / "model")
    return SentenceTokenizer(ModelFolder.open(folder))


def test_what_is_too_long_is_refused_or_cut_and_said(tokenizer: SentenceTokenizer) -> None:
    fits, cut = [CLS, *[CAT] * 14, SEP], [CLS, *[CAT] * 15, SEP]
    for inputs in (["cat " * 14, "cat " * 15], [fits, cut]):
        with pytest.raises(
            InputTooLongError, match=r"input 1 has 17 tokens; .* at most 16"
        ) as told:
            tokenizer.encode(inputs, truncate=False)
        assert (told.value.index, told.value.length, told.value.limit) == (1, 17, 16)
        found = tokenizer.encode(inputs, truncate=True)
        assert [each.tolist() for each in found.tokens] == [fits, fits]
        assert found.truncated == [1]
        assert tokenizer.encode(inputs[:1], truncate=False).truncated == []


def test_of_a_text_no_more_is_looked_at_than_its_tokens_can_hold(
    tokenizer: SentenceTokenizer,
) -> None:
    assert tokenizer.max_characters == 16 * len("[MASK]")
    text = " " * tokenizer.max_characters + "cat"
    with pytest.raises(InputTooLongError, match=r"input 5 has 99 characters; .* at most 96"):
        tokenizer.encode([text], truncate=False, first=5)
    found = tokenizer.encode([text], truncate=True, first=5)
    assert [each.tolist() for each in found.tokens] == [[CLS, SEP]]
    assert found.truncated == [5]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["a", 1], "input 1 is neither"),
        (["a", [1.5]], "input 1 is neither"),
        (["a", [True]], "input 1 is neither"),
        (["a", []], "input 1 is empty"),
        (["a", [2, 99]], "input 1 has token id 99"),
        (["a", [-1]], "input 1 has token id -1"),
        (["a", [1 << 80]], "input 1 has token id 12"),
        ("a", "a list of texts"),
    ],
)
def test_what_is_no_input(tokenizer: SentenceTokenizer, wrong: list[str], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        tokenizer.encode(wrong, truncate=True)


def test_a_text_that_is_not_unicode(tokenizer: SentenceTokenizer) -> None:
    with pytest.raises((TypeError, ValueError)):
        tokenizer.encode(["\ud800"], truncate=True)


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 100))
def test_batches_hold_every_input_once_longest_first(lengths: list[int], most: int) -> None:
    batches = list(make_batches(lengths, most))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    assert all(batch.lengths == [lengths[row] for row in batch.rows] for batch in batches)
    found = [length for batch in batches for length in batch.lengths]
    assert found == sorted(lengths, reverse=True)
    assert all(sum(batch.lengths) <= most or len(batch.rows) == 1 for batch in batches)


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
