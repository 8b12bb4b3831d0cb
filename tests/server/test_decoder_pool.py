"""The decoder over real worker processes: every grid gives transformers' tokens, also when workers
are killed in the middle of answers; and the terminal's chat.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from server.config import PoolConfig
from server.errors import WorkerLostError
from server.pool import WorkerPool
from server.replicas import Replicas
from server.workers.decoder import DecoderFolder, DecoderText, DecoderWorker, Engine, smollm2
from tests.patience import PATIENCE_SECONDS, until
from tests.server.served import ForkedServed
from tests.server.tiny_llama import PROMPTS, greedy

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = Path(__file__).parents[2] / "examples" / "decoder" / "chat.py"
PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)
QUESTIONS = ["Hello! Who are you?", "What is the capital of France?", "Sing me a song of the sea."]
COUNT = 16


def pool_of(folder: Path, tp: int, pp: int, restart: str = "worker", **options: Any) -> WorkerPool:
    arguments = {"model": str(folder), "length": 128, "threads": 1, **options}
    return WorkerPool(
        *(DecoderWorker,), tp=tp, pp=pp, worker_kwargs=arguments, restart=restart, config=PATIENT
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = DecoderText(DecoderFolder.open(smollm2()))
    return [text.encode_chat([{"role": "user", "content": each}]) for each in QUESTIONS]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_real_weights(tp: int, pp: int, prompts: list[list[int]]) -> None:
    """SmolLM2 has 9 query heads and 3 key-value heads: at tp=2 6 and 2 here, 3 and 1 there."""
    ends = DecoderFolder.open(smollm2()).ends
    expected = [
        [token for token in greedy(smollm2(), prompt, COUNT) if token not in ends]
        for prompt in prompts
    ]
    with pool_of(smollm2(), tp, pp) as pool, Engine(pool) as engine:
        together = [engine.submit(prompt, COUNT, timeout=PATIENCE_SECONDS) for prompt in prompts]
        assert [list(each) for each in together] == expected
        alone = engine.submit(prompts[1], COUNT, timeout=PATIENCE_SECONDS)
        assert list(alone) == expected[1]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_killed_workers_change_no_answer(llama: Path, tp: int, pp: int) -> None:
    count = 80
    expected = [greedy(llama, prompt, count) for prompt in PROMPTS]
    # As CUDA graphs are computed, in the largest: a replaced worker has none of those before.
    with pool_of(llama, tp, pp, graphs=tp * pp == 4) as pool, Engine(pool) as engine:
        for victim in range(tp * pp):
            pids = [status.pid for status in pool.status()]
            asked = [engine.submit(each, count, timeout=PATIENCE_SECONDS) for each in PROMPTS]
            tokens = iter(asked[0])
            begun = [next(tokens) for _ in range(3)]
            os.kill(pids[victim], signal.SIGKILL)
            assert [begun + list(tokens), *(list(each) for each in asked[1:])] == expected
            until(partial(_is_restarted, pool, victim + 2))
            stays = [status.pid for status in pool.status()]
            assert [rank for rank in range(tp * pp) if pids[rank] != stays[rank]] == [victim]


def _is_restarted(pool: WorkerPool, generation: int) -> bool:
    return pool.generation == generation and pool.restarting is None


def test_without_restart_answers_fail_with_the_cause(llama: Path) -> None:
    with pool_of(llama, 2, 1, restart="never") as pool, Engine(pool) as engine:
        asked = engine.submit(PROMPTS[0], timeout=PATIENCE_SECONDS, ignore_ends=True)
        tokens = iter(asked)
        next(tokens)
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="rank 1"):
            list(tokens)
        with pytest.raises(WorkerLostError, match="rank 1"):
            engine.submit(PROMPTS[0])


def test_replicas_have_an_engine_each(llama: Path) -> None:
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    arguments = {"model": str(llama), "length": 128, "threads": 1, "slots": 1}
    with Replicas(DecoderWorker, dp=2, worker_kwargs=arguments, config=PATIENT) as replicas:
        with pytest.raises(TypeError, match=r"make one for each of Replicas\.pools"):
            Engine(replicas)
        for pool in replicas.pools:
            with Engine(pool) as engine:
                asked = [engine.submit(each, COUNT, timeout=PATIENCE_SECONDS) for each in PROMPTS]
                assert [list(each) for each in asked] == expected


def test_fifty_streams_at_once(llama: Path) -> None:
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]

    async def read(engine: Engine, at: int) -> list[int]:
        asked = engine.submit(PROMPTS[at % 4], COUNT, timeout=PATIENCE_SECONDS)
        return [token async for token in asked]

    async def read_all(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*(read(engine, at) for at in range(50)))

    with pool_of(llama, 2, 2, slots=7) as pool, Engine(pool) as engine:
        assert asyncio.run(read_all(engine)) == [expected[at % 4] for at in range(50)]


def test_the_service_streams_on_when_a_worker_is_killed(llama: Path) -> None:
    expected = greedy(llama, PROMPTS[0], 90)
    reader = DecoderText(DecoderFolder.open(llama)).reader()
    options = ("--model", str(llama), "--tp", "2", "--restart", "worker", "--max-num-seqs", "2")
    with ForkedServed(*options) as served:
        served.wait_until_ready()
        base_url = f"{served.url}/v1"
        with openai.OpenAI(api_key="none", base_url=base_url, max_retries=0) as client:
            stream = client.completions.create(
                model="model", prompt=PROMPTS[0], temperature=0, max_tokens=90, stream=True
            )
            pieces = [next(stream).choices[0].text]
            os.kill(served.worker_pids()[1], signal.SIGKILL)
            pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == "".join(map(reader.read, expected)) + reader.rest()
        until(lambda: served.get("/status")[1]["restarts"] == 1)


@pytest.fixture
def chat(llama: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example, talking by pipes. Whatever it has started ends with it, however that ends."""
    options = ["--model", str(llama), "--tp", "2", "--pp", "2"]
    process = subprocess.Popen(
        [sys.executable, str(CHAT), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    yield process
    started = started_by(process)
    process.kill()
    process.communicate()
    until(lambda: not any(each.is_running() for each in started))


def started_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def test_a_chat_answers_each_line_and_ends_with_its_input(
    llama: Path, chat: subprocess.Popen[bytes]
) -> None:
    said, errors = chat.communicate(b"hi\n\nbye\n", timeout=PATIENCE_SECONDS)
    assert (chat.returncode, errors) == (0, b"")
    text = DecoderText(DecoderFolder.open(llama))
    prompt = text.encode_chat([{"role": "user", "content": "hi"}])
    reader = text.reader()
    first = "".join(reader.read(token) for token in greedy(llama, prompt, 100))
    assert said.decode().startswith(first)
    assert first


def test_a_chat_goes_on_after_a_line_that_is_too_long(chat: subprocess.Popen[bytes]) -> None:
    said, errors = chat.communicate(b"x" * 300 + b"\nhi \xff\n", timeout=PATIENCE_SECONDS)
    assert chat.returncode == 0
    assert errors.decode().startswith("the prompt has 317 tokens; with its answer at most 128 fit")
    assert said


def test_a_chat_that_is_interrupted_leaves_nothing(chat: subprocess.Popen[bytes]) -> None:
    until(lambda: len(started_by(chat)) > 4)
    started = started_by(chat)
    chat.send_signal(signal.SIGINT)
    _, errors = chat.communicate(timeout=PATIENCE_SECONDS)
    assert (chat.returncode, errors) == (130, b"")
    until(lambda: not any(each.is_running() for each in started))


def test_a_chat_that_cannot_be_says_why(llama: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(CHAT), "--model", str(llama), "--tp", "4"],
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert b"tp must be 1 to 3" in ended.stderr
