"""The service against its own OpenAPI document: schemathesis asks what it allows, and what not."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from server.embedding.embedding_openapi import embedding_document
from tests.server.fake_service import MODEL, listening, run, site

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = 40


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service behind a socket, in a thread of its own."""
    found: list[str] = []
    here, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with site(max_waiting=4096) as service, listening(service) as at:
            found.append(at)
            here.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=run, args=(serve,))
    thread.start()
    assert here.wait(30)
    yield found[0]
    over.set()
    thread.join()


SCHEMA = schemathesis.openapi.from_dict(embedding_document(MODEL, with_key=False))
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations()}
ENDLESS = ("GET /events",)


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", [label for label in OPERATIONS if label not in ENDLESS])
def test_what_it_answers_is_what_it_says(label: str, mode: GenerationMode, url: str) -> None:
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        # JSON Schema takes 4.0 for an integer; JSON that people send for token ids does not.
        assume(mode is GenerationMode.NEGATIVE or ".0" not in repr(case.body))
        case.call_and_validate(base_url=url)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a GET without parameters cannot be wrong


def test_all_routes_are_described() -> None:
    assert {label.split()[1] for label in OPERATIONS} == {
        "/", "/events", "/v1/embeddings", "/v1/models", "/v1/models/{model}", "/health",
        "/health/progress", "/ready", "/status", "/metrics",
    }  # fmt: skip
