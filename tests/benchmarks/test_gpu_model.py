"""The encoder for GPUs, on the CPU: cut over ranks and stages, it is the same one."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu_model import CONFIG, TinyWorker, inputs, reference
from server.errors import WorkerStartError
from server.pool import WorkerPool

TOKENS = inputs(9)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_it_is_the_same_however_it_is_cut(tp: int, pp: int) -> None:
    with WorkerPool(TinyWorker, tp=tp, pp=pp) as pool:
        found = pool.call("embed", TOKENS, timeout=120)
    expected = reference(TOKENS)
    assert found.shape == (9, CONFIG.hidden_size)
    assert np.abs(found - expected).max() < 1e-6
    assert np.abs(expected - expected[0]).max() > 1e-2, "all inputs are embedded alike"


def test_a_cut_that_it_does_not_allow_is_refused() -> None:
    with pytest.raises(WorkerStartError, match="tp=5 does not divide the model's 12"):
        WorkerPool(TinyWorker, tp=5)


def test_inputs_come_as_a_batch_stands() -> None:
    lengths = [len(each) for each in inputs(32)]
    assert lengths == sorted(lengths, reverse=True)
    assert {min(lengths), max(lengths)} == {8, 39}
    assert max(max(each) for each in inputs(32)) < CONFIG.vocab_size
