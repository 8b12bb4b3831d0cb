"""The server as it is run: real workers, the official client, many clients, real signals."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import psutil
import pytest

from benchmarks.http_load import Questions, load
from benchmarks.http_served import Served, gone
from server.config import PACKAGED_NAME
from server.errors import WorkerLostError
from server.workers.minilm import packaged_model
from tests.pages.blocks import block_of
from tests.patience import NAMED_WITHIN, STALL_SECONDS, quickest, until
from tests.server.served import ForkedServed, embed
from tests.server.test_minilm import embed as vectors_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = ["The harbour wakes before the sun does.", "", "word " * 3000, "short", "Ünïcödé ✓"]
FOUR = ("--tp", "2", "--pp", "2", "--max-num-batched-tokens", "1024")
MIB = 1 << 20
ABORTED_KEY = "accepted requests are abandoned"


def as_floats(embedding: Any) -> np.ndarray:
    """As the API sends it: numbers, or base64 of float32."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.asarray(embedding, np.float32)


def in_threads(n: int, served: Served, given: Any) -> tuple[list[Any], list[threading.Thread]]:
    """Ask ``n`` times; each answer is appended with its time."""
    answers: list[Any] = []

    def ask() -> None:
        answers.append((embed(served, given), time.monotonic()))

    threads = [threading.Thread(target=ask) for _ in range(n)]
    for thread in threads:
        thread.start()
    return answers, threads


def wait_for(served: Served, key: str, at_least: int) -> None:
    until(lambda: served.get("/status")[1][key] >= at_least)


def signalled(served: Served, number: signal.Signals) -> None:
    """Send a signal, and wait until the service accepts no connection any more."""
    served.process.send_signal(number)
    until(lambda: not accepts(served))


def accepts(served: Served) -> bool:
    at = urlsplit(served.url)
    try:
        socket.create_connection((at.hostname, at.port), 60).close()
    except ConnectionRefusedError:
        return False
    return True


def stop(served: Served) -> tuple[int, str]:
    served.process.send_signal(signal.SIGTERM)
    return served.finish()


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        psutil.Process(pid).suspend()
    try:
        yield
    finally:
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).resume()


def test_clients_get_vectors_or_errors_until_a_stop() -> None:
    expected = vectors_of(packaged_model(), 1, 1, LINES)
    with Served(*FOUR) as served:
        assert served.get("/health")[0] == 200
        assert served.get("/ready") == (
            503,
            {"ready": False, "reason": "the service is starting"},
        )
        served.wait_until_ready()
        base_url = f"{served.url}/v1"
        with openai.OpenAI(api_key="none", base_url=base_url, max_retries=0) as client:
            for options in ({}, {"encoding_format": None}, {"encoding_format": "base64"}):
                answer = client.embeddings.create(
                    model=PACKAGED_NAME,
                    input=LINES,
                    dimensions=384,
                    extra_body={**options, "truncate": True},
                )
                vectors = [as_floats(entry.embedding) for entry in answer.data]
                assert np.abs(np.stack(vectors) - expected).max() <= 1e-5
            assert answer.usage.prompt_tokens > 256
            one = client.embeddings.create(model=PACKAGED_NAME, input=LINES[0], user="u")
            assert np.abs(as_floats(one.data[0].embedding) - expected[0]).max() <= 1e-5
            assert_errors_have_their_fields(client)

        lines = [row for row, line in enumerate(LINES) if len(line) < 100]
        questions = Questions([LINES[row] for row in lines], expected[lines])
        asyncio.run(load(served.url, PACKAGED_NAME, questions, 100, 1.0)).check()

        def growth() -> int:
            before = served.memory_bytes()
            found = asyncio.run(load(served.url, PACKAGED_NAME, questions, 100, 1.0, seed=1))
            found.check()
            assert len(found.seconds) >= 100
            return served.memory_bytes() - before

        assert any(growth() < 64 * MIB for _ in range(3))  # a leak would grow each time
        assert_a_stop_finishes_what_was_accepted(served)


def assert_a_stop_finishes_what_was_accepted(served: Served) -> None:
    pids = served.worker_pids()
    with stopped(pids):
        answers, threads = in_threads(2, served, ["word " * 30] * 64)
        wait_for(served, "items_waiting", 16)  # of 128, of which three batches are under way
        signalled(served, signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            embed(served, "late")
    for thread in threads:
        thread.join(60)
    assert [len(answer.json()["data"]) for answer, _ in answers] == [64, 64]
    assert served.finish() == (0, "")
    assert gone(pids)


def assert_errors_have_their_fields(client: openai.OpenAI) -> None:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any], str, str | None]] = [
        (openai.NotFoundError, {"model": "other"}, "model", "model_not_found"),
        (openai.BadRequestError, {"input": [[101, 999_999]]}, "input", None),
        (openai.BadRequestError, {"input": "word " * 255}, "input", "context_length_exceeded"),
    ]
    for kind, fields, param, code in wrong:
        given: dict[str, Any] = {"model": PACKAGED_NAME, "input": "a", **fields}
        with pytest.raises(kind) as raised:
            client.embeddings.create(**given)
        told = raised.value
        assert (told.type, told.param, told.code) == ("invalid_request_error", param, code)
        assert told.body is not None
    assert [model.id for model in client.models.list()] == [PACKAGED_NAME]
    assert client.models.retrieve(PACKAGED_NAME).object == "model"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


def test_a_dead_worker_gives_503_by_rank_within_a_second() -> None:
    assert quickest(seconds_until_all_get_503, NAMED_WITHIN) < NAMED_WITHIN


def seconds_until_all_get_503() -> float:
    with ForkedServed(*FOUR, "--truncate") as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        answers, threads = in_threads(8, served, ["word " * 300] * 60)
        wait_for(served, "items_waiting", 300)
        killed = time.monotonic()
        psutil.Process(pids[2]).kill()
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer, _ in answers] == [503] * 8
        assert all(f"rank 2 (pid {pids[2]})" in answer.text for answer, _ in answers)
        ready, why = served.get("/ready")
        assert ready == 503 and f"rank 2 (pid {pids[2]}): killed by SIGKILL" in why["reason"]
        assert embed(served, "later").json()["error"]["code"] == "not_ready"
        health, why = served.get("/health")
        assert health == 503 and f"rank 2 (pid {pids[2]}): killed by SIGKILL" in why["reason"]
        status, errors = served.finish()
        *logged, last = errors.splitlines()
        assert status == 1
        cause = str(WorkerLostError(2, pids[2], "killed by SIGKILL"))
        assert last == f"group-coordinator serve: WorkerLostError: {cause}"
        assert any(line.endswith(cause) for line in logged)
        assert gone(pids)
    return max(at for _, at in answers) - killed


def test_a_lost_worker_is_replaced_as_often_as_allowed_and_no_request_is_lost() -> None:
    options = ("--restart", "worker", "--max-restarts", "1")
    options += ("--request-timeout", "120", "--log-json")
    with ForkedServed(*FOUR, *options) as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        expected = embed(served, "word").json()["data"]
        to_be_lost = psutil.Process(pids[2])
        to_be_lost.suspend()  # what comes now stays: three batches under way, the rest waits
        answers, threads = in_threads(1, served, ["word " * 40] * 90)
        wait_for(served, "calls_running", 3)
        of_the_first = served.get("/status")[1]["items_waiting"]
        later, more = in_threads(7, served, ["word " * 40] * 20)
        wait_for(served, "items_waiting", of_the_first + 7 * 20)  # all are accepted
        to_be_lost.kill()
        for thread in (*threads, *more):
            thread.join()
        assert [answer.status_code for answer, _ in (*answers, *later)] == [200] * 8
        served.wait_until_ready()
        assert embed(served, "word").json()["data"] == expected
        assert served.worker_pids()[2] != pids[2]
        seen = served.get("/status")[1]
        assert f"rank 2 (pid {pids[2]}): killed by SIGKILL" in seen["last_failure"]["text"]
        assert [each["place"]["pp"] for each in seen["workers"]] == [0, 0, 1, 1]
        assert "pool_restarts_total 1.0" in httpx.get(f"{served.url}/metrics").text
        psutil.Process(served.worker_pids()[0]).kill()
        status, errors = served.finish()
    *logged, last = errors.splitlines()
    assert status == 1
    assert "RestartLimitError: the pool has broken again after 1 restarts" in last
    lines = [json.loads(line) for line in logged]
    cause = f"is restarted: {WorkerLostError(2, pids[2], 'killed by SIGKILL')}"
    assert any(cause in line["message"] for line in lines)
    lost, _ = (line for line in lines if " was lost: killed by SIGKILL" in line["message"])
    assert (lost["rank"], lost["generation"], lost["level"]) == (2, 1, "INFO")
    started = [line["generation"] for line in lines if "has started" in line["message"]]
    assert started == [1, 2]
    (again,) = (line for line in lines if "the pool was restarted" in line["message"])
    documented = json.loads(block_of("docs/debugging.md", '"message": "the pool was restarted'))
    again["logger"] = again["logger"].replace("server.", "group_coordinator.")  # as installed
    assert again | {"time": documented["time"]} == documented


def test_a_dead_replica_fails_no_request() -> None:
    with ForkedServed("--dp", "2", "--restart", "worker") as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        assert len(pids) == 2
        assert served.get("/status")[1]["grid"] == {"dp": 2, "pp": 1, "pcp": 1, "tp": 1}
        expected = embed(served, "word").json()["data"]
        answers, threads = in_threads(8, served, ["word"] * 100)
        wait_for(served, "calls_running", 2)
        psutil.Process(pids[0]).kill()
        while any(thread.is_alive() for thread in threads):
            assert embed(served, "word").json()["data"] == expected
        assert [answer.status_code for answer, _ in answers] == [200] * 8
        until(lambda: served.worker_pids()[0] != pids[0])
        assert stop(served)[0] == 0


def lines_up_to(served: Served, text: str) -> str:
    """What the server writes to stderr, up to a line with ``text``, which has to come."""
    found = ""
    while text not in found:
        assert served.process.stderr
        line = served.process.stderr.readline()
        assert line, f"{text!r} was not written: {found}"
        found += line
    return found


def test_a_stopped_worker_is_named_with_its_stack_and_the_service_recovers() -> None:
    with ForkedServed(*FOUR, "--request-timeout", "8", "--stall-timeout", "1") as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        culprit = re.escape(f"Rank 1 (pid {pids[1]}) holds up others: its process is stopped, by ")
        with stopped(pids[1:2]):
            answers, threads = in_threads(1, served, "word")
            until(lambda: served.get("/ready")[0] == 503)
            moving, why = served.get("/health/progress")
            # At first what each rank did last, then a sentence that begins with the culprit.
            assert moving == 503 and f"rank 1 (pid {pids[1]})" in why["reason"].lower()
            assert served.get("/health")[0] == 200
            assert embed(served, "later").json()["error"]["code"] == "not_ready"
            for thread in threads:
                thread.join(60)
            moving, why = served.get("/health/progress")
            for_long = re.match(rf"a call was not answered for (\d+) s: {culprit}", why["reason"])
            assert moving == 503 and for_long and int(for_long[1]) >= 4
            seen = served.get("/status")[1]
            assert seen["calls_running"] >= 1 and seen["oldest_call_seconds"] >= 4.0
        assert answers[0][0].status_code == 504
        assert f"rank 1 (pid {pids[1]})" in answers[0][0].json()["error"]["message"]
        served.wait_until_ready()
        assert embed(served, "word").status_code == 200
        errors = lines_up_to(served, "calls are answered again")
        assert stop(served)[0] == 0
    assert re.search(f"a call was not answered for 1 s: {culprit}.*\n", errors)
    assert "Stack of rank 0:" in errors  # it waits for rank 1, which cannot write its own


def test_a_second_signal_abandons_requests() -> None:
    with ForkedServed("--truncate", "--max-num-batched-tokens", "1024") as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        answers, threads = in_threads(2, served, ["word " * 300] * 200)
        wait_for(served, "items_waiting", 300)
        began = time.monotonic()
        signalled(served, signal.SIGTERM)
        served.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        served.process.send_signal(signal.SIGTERM)
        status, errors = served.finish()
        assert status == 1 and ABORTED_KEY in errors.splitlines()[-1]
        assert time.monotonic() - began < 10.0 + STALL_SECONDS
        assert [answer.status_code for answer, _ in answers] == [503, 503]
        assert gone(pids)


@pytest.mark.parametrize(
    ("loading", "numbers", "status"),
    [
        (False, [signal.SIGINT], 130),
        (True, [signal.SIGTERM, signal.SIGTERM], 0),
    ],
)
def test_a_stop_before_it_is_ready_ends_every_process(
    loading: bool, numbers: list[signal.Signals], status: int
) -> None:
    with ForkedServed(*FOUR) as served:
        children: list[int] = []
        while loading and len(children) < 4:
            children = [child.pid for child in psutil.Process(served.process.pid).children()]
        for number in numbers:
            served.process.send_signal(number)
            time.sleep(0.3)
        given_up = {1} if len(numbers) > 1 else set()  # the second was heard before the end
        ended, errors = served.finish()
        assert ended in {status} | given_up
        assert errors == ""
        assert gone(children)
