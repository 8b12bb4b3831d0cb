"""Metrics are what clients and workers count themselves; dashboard and alerts ask for no others."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.config import PACKAGED_NAME
from server.service.metrics import STATES
from tests.server.fake_service import MAX_TOKENS, labelled, listening, samples, site
from tests.server.served import ForkedServed
from tests.server.test_completions import site as completing

if TYPE_CHECKING:
    from prometheus_client import Metric

    from server.service.pool_service import PoolService

ROOT = Path(__file__).parents[2]
CLIENTS = 300
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


class Tally:
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


TLS = ssl.create_default_context()  # one for each client would take longer than its requests


async def ask(url: str, number: int, tally: Tally) -> None:
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


async def test_counters_are_those_of_many_clients() -> None:
    tally = Tally()
    async with (
        site(max_waiting=40) as here,
        listening(here, api_key="secret", connections=2 * CLIENTS) as url,
    ):
        # In waves: each client has two sockets of this process.
        for first in range(0, CLIENTS - 100, 100):
            await asyncio.gather(*(ask(url, n, tally) for n in range(first, first + 100)))
        here.pool.kill()
        await asyncio.gather(*(ask(url, n, tally) for n in range(CLIENTS - 100, CLIENTS)))
        found, totals = here.samples(), here.service.status()["totals"]
    assert sum(tally.statuses.values()) == CLIENTS
    assert tally.statuses.keys() >= {"200", "400", "401", "404", "429", "500", "503"}
    assert labelled(found, "service_requests_total") == totals["requests"] == tally.statuses
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


async def test_real_workers_count_what_their_clients_asked_for() -> None:
    tally = Tally()

    async def client(url: str, number: int) -> None:
        async with httpx.AsyncClient(timeout=60, verify=TLS) as own:
            for turn in range(3):
                name = "another" if (number + turn) % 7 == 0 else PACKAGED_NAME
                body = {"model": name, "input": ["The harbour wakes."] * (1 + turn)}
                tally.count(await own.post(f"{url}/v1/embeddings", json=body))

    with ForkedServed("--tp", "2", "--pp", "2") as served:
        await asyncio.to_thread(served.wait_until_ready)
        await asyncio.gather(*(client(served.url, number) for number in range(20)))
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


# --- The dashboard and the alerts --------------------------------------------------------

WORDS = {"and", "or", "unless", "bool", "offset"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture(scope="module")
def exported(llama: Path) -> list[list[Metric]]:
    """What a service of embeddings exports, and one of completions."""

    async def look() -> list[list[Metric]]:
        async with site() as here, completing(llama) as there:
            for _ in range(2):
                await here.embed("a")
                await here.embed([])
                await here.embed("boom")
            await there.complete("a", max_tokens=2)
            return [families(here.service), families(there.service)]

    return asyncio.run(look())


def families(service: PoolService) -> list[Metric]:
    return list(text_string_to_metric_families(service.metrics.expose().decode()))


@pytest.fixture(scope="module")
def names(exported: list[list[Metric]]) -> dict[str, set[str]]:
    """The names that can be asked for, with their labels."""
    return {
        family.name.removesuffix("_total") + suffix: {
            label for sample in family.samples for label in sample.labels
        }
        for service in reversed(exported)
        for family in service
        for suffix in SUFFIXES[family.type]
    }


def bare(names: set[str]) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def asked_for(expression: str) -> set[str]:
    """The metrics in a PromQL expression."""
    rest = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    rest = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", rest)
    names = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w|\s*\()", rest)
    return {name for name in names if name not in WORDS}


def labels_of(expression: str) -> set[str]:
    """The labels that it selects or groups by."""
    inside = re.findall(r"\{([^}]*)\}", expression)
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    told = {name for part in inside for name in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", part)}
    return told | {name.strip() for part in grouped for name in part.split(",")}


def dashboard() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads((ROOT / "deploy/grafana.json").read_text())["panels"]
    return panels


def check(expression: str, legend: str, names: dict[str, set[str]]) -> set[str]:
    asked = asked_for(expression)
    assert asked, expression
    assert asked <= names.keys(), expression
    there = {"instance", "le"}.union(*(names[name] for name in asked))
    assert labels_of(expression) <= there, expression
    assert {*re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", legend)} <= there, legend
    assert expression.count("(") == expression.count(")")
    states = re.findall(r'state="(\w+)"', expression)
    assert {*states} <= {*STATES}
    return asked


def test_what_the_dashboard_shows_is_exported(names: dict[str, set[str]]) -> None:
    shown = set()
    for panel in dashboard():
        for target in panel["targets"]:
            shown |= check(target["expr"], target["legendFormat"], names)
    hidden = {"target_info", "service_inputs_truncated_total", "pool_calls_total"}
    assert bare({*names}) - bare(shown) == hidden


def test_what_the_alerts_ask_for_is_exported(names: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        annotations = " ".join(rule["annotations"].values())
        check(rule["expr"], annotations.replace("$value", ""), names)
        assert rule["labels"]["severity"] in ("warning", "critical")
    called = [rule["alert"] for rule in group["rules"]]
    assert len(called) == len({*called})


def test_a_service_of_completions_exports_the_same(exported: list[list[Metric]]) -> None:
    embeddings, completions = ({family.name for family in each} for each in exported)
    assert {name for name in completions if not name.startswith("llm_")} == embeddings
    (kind,) = (family for family in exported[1] if family.name == "target_info")
    assert kind.samples[0].labels == {"kind": "completion"}


def test_all_that_is_exported_is_described(names: dict[str, set[str]]) -> None:
    described = {*re.findall(r"`([a-z_]+)`", (ROOT / "docs/monitoring.md").read_text())}
    assert bare({*names}) <= described
