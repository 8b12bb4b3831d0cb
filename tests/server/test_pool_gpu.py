"""A pool on CUDA, its workers sharing a GPU where there are more of them; equal to the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu_model import TinyWorker, inputs, reference
from server.config import TOLERANCES
from server.pool import WorkerPool

pytestmark = pytest.mark.gpu
TOKENS = inputs(20)


def start(tp: int, pp: int, dtype: str) -> WorkerPool:
    return WorkerPool(
        TinyWorker,
        tp=tp,
        pp=pp,
        device="cuda",
        share_gpu=True,
        worker_kwargs={"dtype": dtype},
        start_timeout=120,
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_a_pool_finds_what_one_process_on_the_cpu_finds(tp: int, pp: int, dtype: str) -> None:
    with start(tp, pp, dtype) as pool:
        found = pool.call("embed", TOKENS, timeout=120)
    assert np.abs(found - reference(TOKENS)).max() <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_steps_in_a_graph_find_what_an_eager_step_finds(dtype: str) -> None:
    with start(2, 1, dtype) as pool:
        for each in pool.collective_rpc("steps", 120, (TOKENS, 100)):
            assert each["difference"] <= TOLERANCES[dtype]
