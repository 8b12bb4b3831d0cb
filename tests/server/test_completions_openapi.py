"""The service of completions against its own OpenAPI document; see `test_openapi`."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from server.completion.completion_openapi import completion_document
from server.web.api import ServedModel
from tests.server.test_completions import site
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = 10
SCHEMA = schemathesis.openapi.from_dict(
    completion_document(ServedModel("m", 36, 64, 257), with_key=False)
)
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service behind a socket, in a thread of its own."""
    found: list[str] = []
    here, over = threading.Event(), threading.Event()
    folder = make_llama(tmp_path_factory.mktemp("llama") / "model")

    async def serve() -> None:
        async with site(folder) as made:
            found.append(made.url)
            here.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert here.wait(30)
    yield found[0]
    over.set()
    thread.join()


@pytest.mark.parametrize("label", ["POST /v1/completions", "POST /v1/chat/completions"])
def test_what_it_says_is_wrong_is_refused(label: str, url: str) -> None:
    @given(case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(base_url=url)

    check()


def test_all_routes_are_described() -> None:
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"} <= {*OPERATIONS}
    assert "POST /v1/embeddings" not in OPERATIONS
