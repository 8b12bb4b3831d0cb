"""A decoder on CUDA, its workers sharing a GPU: its tokens are those of the CPU."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu_decoder import make_decoder
from server.pool import WorkerPool
from server.workers.decoder import DecoderWorker, Engine, Sampling

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 2, 77, 31], [8], [*range(250), *range(50)], [50, 50, 50]]
COUNT = 40
TIMEOUT = 120.0
SAMPLED = Sampling(0.8, top_p=0.95, seed=5)
"""Random weights settle on one token soon when the likeliest is always drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 4, "intermediate_size": 200}
    return make_decoder(
        tmp_path_factory.mktemp("decoder") / "model",
        0.2,
        num_attention_heads=6,
        num_key_value_heads=3,
        **sizes,
    )


def pool_of(folder: Path, tp: int, pp: int, device: str, graphs: bool) -> WorkerPool:
    return WorkerPool(
        DecoderWorker,
        tp=tp,
        pp=pp,
        device=device,
        share_gpu=device == "cuda",
        worker_kwargs={"model": str(folder), "length": 512, "graphs": graphs},
        start_timeout=TIMEOUT,
        restart="worker",
    )


def answers(engine: Engine) -> list[list[int]]:
    asked = [engine.submit(each, COUNT, SAMPLED, timeout=TIMEOUT) for each in PROMPTS]
    return [list(each) for each in asked]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with pool_of(folder, 1, 1, "cpu", graphs=False) as pool, Engine(pool) as engine:
        found = answers(engine)
    assert all(len(set(each)) > COUNT // 4 for each in found)
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_tokens_are_those_of_the_cpu(
    folder: Path, expected: list[list[int]], tp: int, pp: int, graphs: bool
) -> None:
    with pool_of(folder, tp, pp, "cuda", graphs) as pool, Engine(pool) as engine:
        assert answers(engine) == expected
        assert answers(engine) == expected  # with graphs that are there


def test_a_killed_worker_changes_no_answer(folder: Path, expected: list[list[int]]) -> None:
    with pool_of(folder, 2, 1, "cuda", graphs=True) as pool, Engine(pool) as engine:
        asked = [engine.submit(each, COUNT, SAMPLED, timeout=TIMEOUT) for each in PROMPTS]
        tokens = iter(asked[0])
        begun = [next(tokens) for _ in range(5)]
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert [begun + list(tokens), *(list(each) for each in asked[1:])] == expected
        assert pool.generation == 2
