"""The server as it is run: real workers, the official client, signals."""

from __future__ import annotations

import argparse
import base64
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from server import serve
from server.demo import reference
from server.workers.minilm import ModelFolder, packaged_model

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
START = (
    "import argparse, sys\n"
    "from server import serve\n"
    "parser = argparse.ArgumentParser()\n"
    "serve.add_arguments(parser)\n"
    "sys.exit(serve.run(serve.prepare(parser.parse_args())))\n"
)
LINES = ["The harbour wakes before the sun does.", "", "word " * 3000, "short", "Ünïcödé ✓"]


class Server:
    """A server process of two stages by two parts, at a port that it chose."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, "--tp", "2", "--pp", "2", "--http", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 120
        while (answer := self.http.get("/ready")).status_code != 200:
            assert time.monotonic() < end, answer.text
            time.sleep(0.2)

    def embed(self, given: Any) -> httpx.Response:
        return self.http.post("/v1/embeddings", json={"model": serve.PACKAGED_NAME, "input": given})

    def workers(self) -> list[int]:
        return [worker["pid"] for worker in self.http.get("/status").json()["workers"]]

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def as_floats(embedding: Any) -> np.ndarray:
    """As the API sends it: numbers, or base64 of float32."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.asarray(embedding, np.float32)


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_the_official_client_gets_the_models_vectors_and_a_stop_finishes_what_was_accepted(
    server: Server,
) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    server.wait_until_ready()
    expected = reference(ModelFolder.open(packaged_model()), LINES)
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        for encoding in ("float", "base64"):
            answer = client.embeddings.create(
                model=serve.PACKAGED_NAME, input=LINES, extra_body={"encoding_format": encoding}
            )
            vectors = [as_floats(entry.embedding) for entry in answer.data]
            assert np.abs(np.stack(vectors) - expected).max() <= 1e-5
        assert answer.usage.prompt_tokens > 256
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=serve.PACKAGED_NAME, input=[])

    answers: list[httpx.Response] = []
    busy = threading.Thread(target=lambda: answers.append(server.embed(["word " * 300] * 64)))
    busy.start()
    while not server.http.get("/status").json()["batches_running"]:
        time.sleep(0.01)
    pids = server.workers()
    server.process.send_signal(signal.SIGTERM)
    busy.join(120)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["data"]) == 64
    _, errors = server.process.communicate(timeout=60)
    assert (server.process.returncode, errors) == (0, "")
    assert gone(pids)


def test_a_dead_worker_turns_requests_and_readiness_into_503(server: Server) -> None:
    server.wait_until_ready()
    pids = server.workers()
    answers: list[tuple[float, httpx.Response]] = []

    def ask() -> None:
        answer = httpx.post(
            f"{server.url}/v1/embeddings",
            json={"model": serve.PACKAGED_NAME, "input": ["word " * 300] * 2000},
            timeout=120,
        )
        answers.append((time.monotonic(), answer))

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    while not server.http.get("/status").json()["batches_running"]:
        time.sleep(0.01)
    killed = time.monotonic()
    psutil.Process(pids[2]).kill()
    for thread in asking:
        thread.join(60)
    assert [answer.status_code for _, answer in answers] == [503, 503]
    assert all(f"rank 2 (pid {pids[2]})" in answer.text for _, answer in answers)
    assert max(at for at, _ in answers) - killed < 5.0
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200
    assert gone(pids)


def test_a_stop_while_workers_load_ends_them(server: Server) -> None:
    children: list[int] = []
    while not children:
        children = [child.pid for child in psutil.Process(server.process.pid).children()]
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    assert gone(children)


def arguments(**given: Any) -> Any:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return SimpleNamespace(**{**vars(parser.parse_args([])), **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"http": "8000"}, "HOST:PORT"),
        ({"http": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"http": "0.0.0.0:8000"}, "beyond loopback: give --api-key"),
        ({"http": "[::]:8000"}, "beyond loopback"),
        ({"http": "example.org:8000"}, "beyond loopback"),
        ({"tp": 5}, "tp=5 does not divide"),
        ({"max_batch": 0}, "--max-batch must be at least 1"),
        ({"max_waiting": 0}, "--max-waiting must be at least 1"),
        ({"timeout": 0.0}, "--timeout must be more than 0"),
    ],
)
def test_wrong_options_are_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        serve.prepare(arguments(**given))


@pytest.mark.parametrize("where", ["[::1]:0", "localhost:1", "127.0.0.1:0"])
def test_loopback_needs_no_key(where: str) -> None:
    assert serve.prepare(arguments(http=where)).api_key is None


def test_beyond_loopback_with_a_key() -> None:
    assert serve.prepare(arguments(http="0.0.0.0:80", api_key="k")).host == "0.0.0.0"


def test_a_port_that_is_taken_is_told_before_workers_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = serve.prepare(arguments(http=f"127.0.0.1:{taken.getsockname()[1]}"))
        with pytest.raises(OSError, match="in use"):
            serve.run(plan)
