"""The decoder over real workers: its tokens, past kills too; its page and its chat."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from server.config import PoolConfig
from server.pool import WorkerPool
from server.replicas import Replicas
from server.service.completions import PLAIN
from server.workers.decoder import DecoderFolder, DecoderText, DecoderWorker, Engine, smollm2
from tests.commands import ROOT, run_to_end
from tests.pages.blocks import block_of, read
from tests.patience import PATIENCE_SECONDS, until
from tests.programs import Program, run_script
from tests.server.served import ForkedServed
from tests.server.tiny_llama import PROMPTS, greedy

if TYPE_CHECKING:
    from pathlib import Path

CHAT = str(ROOT / "examples" / "decoder" / "chat.py")
PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)
QUESTIONS = ["Hello! Who are you?", "What is the capital of France?"]
COUNT = 12


def pool_of(folder: Path, **options: Any) -> WorkerPool:
    return WorkerPool(
        DecoderWorker,
        tp=2,
        pp=2,
        worker_kwargs={"model": str(folder), "length": 128, "threads": 1, **options},
        restart="worker",
        config=PATIENT,
    )


def test_real_weights_give_the_tokens_of_transformers() -> None:
    """SmolLM2 has 9 query heads and 3 key-value heads: at tp=2 6 and 2 here, 3 and 1 there."""
    folder = DecoderFolder.open(smollm2())
    text = DecoderText(folder)
    prompts = [text.encode_chat([{"role": "user", "content": each}]) for each in QUESTIONS]
    expected = [
        [token for token in greedy(smollm2(), prompt, COUNT) if token not in folder.ends]
        for prompt in prompts
    ]
    with pool_of(smollm2()) as pool, Engine(pool) as engine:
        together = [engine.submit(prompt, COUNT, timeout=PATIENCE_SECONDS) for prompt in prompts]
        assert [list(each) for each in together] == expected
        alone = engine.submit(prompts[1], COUNT, timeout=PATIENCE_SECONDS)
        assert list(alone) == expected[1]


def test_killed_workers_change_no_answer(llama: Path) -> None:
    count = 80
    expected = [greedy(llama, prompt, count) for prompt in PROMPTS]
    # Computed as CUDA graphs are: a replaced worker has none of those before.
    with pool_of(llama, graphs=True) as pool, Engine(pool) as engine:
        for victim in range(4):
            pids = [status.pid for status in pool.status()]
            asked = [engine.submit(each, count, timeout=PATIENCE_SECONDS) for each in PROMPTS]
            tokens = iter(asked[0])
            begun = [next(tokens) for _ in range(3)]
            os.kill(pids[victim], signal.SIGKILL)
            assert [begun + list(tokens), *(list(each) for each in asked[1:])] == expected
            until(partial(_is_restarted, pool, victim + 2))
            stays = [status.pid for status in pool.status()]
            assert [rank for rank in range(4) if pids[rank] != stays[rank]] == [victim]


def _is_restarted(pool: WorkerPool, generation: int) -> bool:
    return pool.generation == generation and pool.restarting is None


def test_each_replica_has_its_own_engine(llama: Path) -> None:
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    arguments = {"model": str(llama), "length": 128, "threads": 1, "slots": 1}
    with Replicas(DecoderWorker, dp=2, worker_kwargs=arguments, config=PATIENT) as replicas:
        with pytest.raises(TypeError, match=r"make one for each of Replicas\.pools"):
            Engine(replicas)
        for pool in replicas.pools:
            with Engine(pool) as engine:
                asked = [engine.submit(each, COUNT, timeout=PATIENCE_SECONDS) for each in PROMPTS]
                assert [list(each) for each in asked] == expected


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


def test_a_chat_answers_each_line_and_ends_with_its_input(llama: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"x" * 300 + b"\nhi\n\nbye \xff\n")
    chat = Program(run_script, CHAT, str(lines), "--model", str(llama), "--tp", "2", "--pp", "2")
    said, errors = chat.communicate()
    assert chat.returncode == 0, errors
    assert errors.startswith("the prompt has 317 tokens; with its answer at most 128 fit")
    assert errors.count("\n") == 1
    text = DecoderText(DecoderFolder.open(llama))
    prompt = text.encode_chat([{"role": "user", "content": "hi"}])
    reader = text.reader()
    first = "".join(reader.read(token) for token in greedy(llama, prompt, 100))
    assert first
    assert said.startswith(first)


def test_an_interrupted_chat_leaves_no_process(llama: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    os.mkfifo(lines)
    chat = Program(run_script, CHAT, str(lines), "--model", str(llama), "--tp", "2", "--pp", "2")
    try:
        with lines.open("w"):
            until(lambda: len(psutil.Process(chat.pid).children(recursive=True)) > 4)
            started = psutil.Process(chat.pid).children(recursive=True)
            chat.send_signal(signal.SIGINT)
            _, errors = chat.communicate()
        assert (chat.returncode, errors) == (130, "")
        until(lambda: not any(each.is_running() for each in started))
    finally:
        chat.kill()


def test_a_chat_that_cannot_start_gives_the_reason(llama: Path) -> None:
    chat = Program(run_script, CHAT, os.devnull, "--model", str(llama), "--tp", "4")
    _, errors = chat.communicate()
    assert chat.returncode == 2
    assert "tp must be 1 to 3" in errors


# --- docs/decoder.md, but for the port ----------------------------------------------------


def test_the_engine_of_the_page_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = block_of("docs/decoder.md", "WorkerPool(DecoderWorker")
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert len(expected) == 2
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == expected


def test_the_page_lists_the_refused_fields_and_the_chat() -> None:
    _, _, listed = read("docs/decoder.md").partition("These fields are refused with status 400")
    assert re.findall(r"`(\w+)`", listed.partition("Other fields")[0]) == [*PLAIN]
    assert "make chat" in block_of("docs/decoder.md", "make chat")
    assert "examples/decoder/chat.py" in run_to_end("make", "-n", "chat").stdout


def test_the_service_of_the_page_answers_as_shown() -> None:
    command, *options = shlex.split(block_of("docs/decoder.md", "group-coordinator serve"))
    assert (command, options.pop(0)) == ("group-coordinator", "serve")
    curl = block_of("docs/decoder.md", "curl -sN")
    assert "http://127.0.0.1:8000" in curl
    with ForkedServed(*options) as served:
        served.wait_until_ready()
        shown = run_to_end("bash", "-c", curl.replace("http://127.0.0.1:8000", served.url)).stdout
    events = [line.removeprefix("data: ") for line in shown.splitlines() if line]
    assert events.pop() == "[DONE]"
    said = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(said) == "The capital of France is Paris."
