"""The dashboard and the alert rules ask only for what the service exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.service.metrics import STATES
from tests.server.fake_service import run, site
from tests.server.test_completions import site as completing
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from prometheus_client import Metric

    from server.service.pool_service import PoolService

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = Path(__file__).parents[2] / "docs" / "monitoring.md"
WORDS = {"and", "or", "unless", "bool", "offset"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names that can be asked for, with the labels that they have."""
    found: dict[str, set[str]] = {}
    llama = make_llama(tmp_path_factory.mktemp("model") / "model")

    async def look() -> None:
        async with site() as here, completing(llama) as there:
            for _ in range(2):
                await here.embed("a")
                await here.embed([])
                await here.embed("boom")
            await there.complete("a", max_tokens=2)
            for family in (*families(there.service), *families(here.service)):
                labels = {label for sample in family.samples for label in sample.labels}
                for suffix in SUFFIXES[family.type]:
                    found[family.name.removesuffix("_total") + suffix] = labels

    run(look)
    return found


def families(service: PoolService) -> list[Metric]:
    """What a service exports."""
    return list(text_string_to_metric_families(service.metrics.expose().decode()))


def asked_for(expression: str) -> set[str]:
    """The metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    names = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w|\s*\()", bare)
    return {name for name in names if name not in WORDS}


def labels_of(expression: str) -> set[str]:
    """The labels that it selects or groups by."""
    inside = re.findall(r"\{([^}]*)\}", expression)
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    told = {name for part in inside for name in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", part)}
    return told | {name.strip() for part in grouped for name in part.split(",")}


def dashboard() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return panels


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


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
    told = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    every = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert every - told == {"target_info", "service_inputs_truncated_total", "pool_calls_total"}


def test_the_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard()]
    assert len(ids) == len({*ids})


def test_what_the_alerts_ask_for_is_exported(names: dict[str, set[str]]) -> None:
    for rule in rules():
        annotations = " ".join(rule["annotations"].values())
        check(rule["expr"], annotations.replace("$value", ""), names)
        assert rule["labels"]["severity"] in ("warning", "critical")
    called = [rule["alert"] for rule in rules()]
    assert len(called) == len({*called})


def test_a_service_of_completions_exports_the_same(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    async def look() -> None:
        async with site() as here, completing(make_llama(tmp_path / "model")) as there:
            seen.extend({each.name for each in families(at.service)} for at in (here, there))
            (kind,) = (each for each in families(there.service) if each.name == "target_info")
            assert kind.samples[0].labels == {"kind": "completion"}

    run(look)
    assert {name for name in seen[1] if not name.startswith("llm_")} == seen[0]


def test_all_that_is_exported_is_described(names: dict[str, set[str]]) -> None:
    described = {*re.findall(r"`([a-z_]+)`", DOCS.read_text())}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= described
