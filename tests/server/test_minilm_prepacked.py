"""Products with weights that were laid out once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from server.workers import parallel
from tests.commands import run_code
from tests.server.tiny_bert import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANY_ROW_COUNTS = """
import psutil, torch
from server.workers import parallel

torch.set_num_threads(1)
weight = parallel.prepack(torch.randn(384, 384))
x = torch.randn(700, 384)
parallel.linear(x, weight, None)
before = psutil.Process().memory_info().rss
for rows in range(1, 700):
    parallel.linear(x[:rows], weight, None)
print((psutil.Process().memory_info().rss - before) >> 20)
"""

MANY_BATCHES = """
import sys
import numpy as np
from server.workers.minilm import MiniLMWorker
from tests.server.fake_groups import run_threads

def body(context):
    worker = MiniLMWorker(context, sys.argv[1], threads=1)
    for inputs in range(1, 200):
        worker.embed([np.full(1 + number % 3, 2) for number in range(inputs)])

run_threads(1, 1, body)
"""


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize(("outputs", "inputs"), [(384, 96), (37, 12), (1, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_same_for_any_number_of_rows(
    outputs: int, inputs: int, biased: bool
) -> None:
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs)
    packed = parallel.prepack(weight)
    for rows in (1, 7, 8, 9, 64, 65, 96, 127, 128, 129, 191, 256, 300):
        x = torch.randn(rows, inputs)
        before = x.clone()
        y = parallel.linear(x, packed, bias)
        expected = functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        assert y.shape == expected.shape
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(x, before)


@pytest.mark.parametrize("activation", [functional.gelu, double])
def test_an_activation_along_with_the_product(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    weight, bias = torch.randn(37, 12), torch.randn(37)
    packed = parallel.prepack(weight)
    for rows in (1, 8, 63, 128, 129, 300):
        x = torch.randn(rows, 12)
        y = parallel.linear(x, packed, bias, activation)
        assert y.shape == (rows, 37)
        torch.testing.assert_close(y, activation(functional.linear(x, weight, bias)))


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_no_kernels_are_made_for_each_number_of_tokens(tmp_path: Path, activation: str) -> None:
    """They would stay, between the tensors of later batches: memory that nobody can use."""
    ran = run_code(
        MANY_BATCHES,
        make_model(tmp_path / "model", activation=activation),
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
    )
    assert 0 < ran.stdout.count("create:cache_miss") < 100


def test_memory_does_not_grow_with_the_row_counts_that_were_met() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", MANY_ROW_COUNTS], check=True, capture_output=True, timeout=120
    )
    assert int(grown.stdout) < 50


def test_only_float32_on_a_cpu_is_laid_out() -> None:
    assert parallel.can_prepack(torch.zeros(4, 4))
    assert not parallel.can_prepack(torch.zeros(4, 4, dtype=torch.float16))
    assert not parallel.can_prepack(torch.zeros(4, 4, device="meta"))
