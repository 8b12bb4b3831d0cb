"""What the metrics say, against what clients and workers have counted themselves."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.config import PACKAGED_NAME
from tests.server.fake_service import MAX_TOKENS, Site, listening, run, site
from tests.server.served import ForkedServed

CLIENTS = 1000
KEY = {"authorization": "Bearer secret"}
KINDS: tuple[dict[str, Any], ...] = (
    {"input": "word"},
    {"input": ["a", "bc", "def"]},
    {"input": ["x" * 5] * 4},
    {"input": "x" * 30, "encoding_format": "base64"},
    {"input": []},
    {"input": "x" * (MAX_TOKENS + 1)},
    {"input": "x" * (MAX_TOKENS + 1), "truncate": True},
    {"input": "a", "model": "another"},
    {"input": ["x"] * 50},
    {"input": "boom"},
)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """The samples of an exposition by name and the values of its labels, as these are sorted."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(found: dict[tuple[str, ...], float], name: str) -> dict[str, float]:
    """The samples of a metric with one label, by its value."""
    return {key[1]: value for key, value in found.items() if key[0] == name}


class Fingerprint:
    """What clients have counted."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.inputs = self.tokens = self.truncated = 0

    def count(self, answer: httpx.Response) -> None:
        self.statuses[str(answer.status_code)] += 1
        if answer.status_code == 200:
            self.inputs += len(answer.json()["data"])
            self.tokens += answer.json()["usage"]["prompt_tokens"]
            self.truncated += int(answer.headers.get("x-truncated-inputs", 0))
        else:
            error = answer.json()["error"]
            self.codes[error["code"] or error["type"]] += 1


TLS = ssl.create_default_context()
"""One for all clients: to make one for each would take longer than their requests."""


async def ask(url: str, number: int, tally: Fingerprint) -> None:
    """One client, with a connection of its own."""
    body = {"model": "m", **KINDS[number % len(KINDS)]}
    headers = {} if number % 23 == 0 else KEY
    async with httpx.AsyncClient(timeout=120, verify=TLS) as client:
        url += "/v1/embeddings"
        if number % 29 == 0:
            answer = await client.post(url, content=b"{", headers=headers)
        else:
            answer = await client.post(url, json=body, headers=headers)
    tally.count(answer)


def test_counters_are_what_a_thousand_clients_have_counted() -> None:
    tally = Fingerprint()

    async def test() -> None:
        async with (
            site(max_waiting=40) as here,
            listening(here, api_key="secret", connections=2 * CLIENTS) as url,
        ):
            # In waves: each client has two sockets of this process.
            for first in range(0, CLIENTS - 100, 100):
                await asyncio.gather(*(ask(url, n, tally) for n in range(first, first + 100)))
            here.pool.kill()
            await asyncio.gather(*(ask(url, n, tally) for n in range(CLIENTS - 100, CLIENTS)))
            compare(here, here.service.metrics.expose().decode())

    def compare(here: Site, shown: str) -> None:
        found = samples(shown)
        assert sum(tally.statuses.values()) == CLIENTS
        assert tally.statuses.keys() >= {"200", "400", "401", "404", "429", "500", "503"}
        assert labelled(found, "service_requests_total") == tally.statuses
        assert labelled(found, "service_errors_total") == tally.codes
        assert found["service_inputs_total",] == tally.inputs
        assert found["service_tokens_total",] == tally.tokens
        assert found["service_inputs_truncated_total",] == tally.truncated > 0
        assert found["service_request_seconds_count",] == tally.statuses["200"]
        calls = labelled(found, "pool_calls_total")
        assert calls["ok"] == found["pool_call_seconds_count", "ok"]
        assert calls["error"] == found["pool_call_seconds_count", "error"]
        assert calls["error"] == sum(labelled(found, "pool_call_errors_total").values()) > 0
        assert sum(calls.values()) == found["pool_batch_items_count",]
        assert here.service.status()["totals"]["requests"] == tally.statuses

    run(test)


async def test_what_ranks_did_together_is_told_by_group_and_verb() -> None:
    async with site() as here:
        found = samples(here.service.metrics.expose().decode())
        of = ("tp", "0", "all_reduce")
        assert found["worker_operations_total", *of] == 7
        assert found["worker_operation_failures_total", *of] == 1
        assert found["worker_operation_seconds_total", *of] == 0.5
        assert found["worker_operation_bytes_total", *of] == 4096


def test_real_workers_count_what_their_clients_asked_for() -> None:
    tally = Fingerprint()

    async def client(url: str, number: int) -> None:
        async with httpx.AsyncClient(timeout=60, verify=TLS) as own:
            for turn in range(5):
                name = "another" if (number + turn) % 7 == 0 else PACKAGED_NAME
                body = {"model": name, "input": ["The harbour wakes."] * (1 + turn)}
                tally.count(await own.post(f"{url}/v1/embeddings", json=body))

    async def clients(url: str) -> None:
        await asyncio.gather(*(client(url, number) for number in range(40)))

    with ForkedServed("--tp", "2", "--pp", "2") as served:
        served.wait_until_ready()
        asyncio.run(clients(served.url))
        found = samples(httpx.get(f"{served.url}/metrics").text)
    assert labelled(found, "service_requests_total") == tally.statuses
    assert set(tally.statuses) == {"200", "404"}
    assert (found["service_inputs_total",], found["service_tokens_total",]) == (
        tally.inputs,
        tally.tokens,
    )
    assert found["pool_batch_items_sum",] == tally.inputs + 1  # the probe
    calls = found["pool_calls_total", "ok"]
    for rank in ("0", "1", "2", "3"):
        # Three layers a stage, each with attention and MLP summed up over its two ranks.
        assert found["worker_operations_total", "tp", rank, "all_reduce"] >= 6 * calls
        assert found["worker_operation_seconds_total", "tp", rank, "all_reduce"] > 0
        assert found["worker_operations_total", "", rank, "enqueue"] == calls
    sent, got = ("pp", "0", "send"), ("pp", "2", "recv")
    assert found["worker_operations_total", *sent] == found["worker_operations_total", *got] > calls
    size = "worker_operation_bytes_total"
    assert found[size, *sent] == found[size, *got] > 0
