"""Products with weights that were laid out once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from server.workers.minilm import prepacked

MANY_ROW_COUNTS = """
import psutil, torch
from server.workers.minilm import prepacked

torch.set_num_threads(1)
weight = prepacked.prepack(torch.randn(384, 384))
x = torch.randn(700, 384)
prepacked.linear(x, weight, None)
before = psutil.Process().memory_info().rss
for rows in range(1, 700):
    prepacked.linear(x[:rows], weight, None)
print((psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.parametrize(("outputs", "inputs"), [(384, 96), (37, 12), (1, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_same_for_any_number_of_rows(
    outputs: int, inputs: int, biased: bool
) -> None:
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs)
    packed = prepacked.prepack(weight)
    for rows in (1, 7, 8, 9, 64, 65, 96, 127, 128, 129, 191, 256, 300):
        x = torch.randn(rows, inputs)
        before = x.clone()
        y = prepacked.linear(x, packed, bias)
        expected = functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        assert y.shape == expected.shape
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(x, before)


def test_memory_does_not_grow_with_the_row_counts_that_were_met() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", MANY_ROW_COUNTS], check=True, capture_output=True, timeout=120
    )
    assert int(grown.stdout) < 50


def test_only_float32_on_a_cpu_is_laid_out() -> None:
    assert prepacked.can_prepack(torch.zeros(4, 4))
    assert not prepacked.can_prepack(torch.zeros(4, 4, dtype=torch.float16))
    assert not prepacked.can_prepack(torch.zeros(4, 4, device="meta"))
