"""The service of completions against its own OpenAPI document."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from schemathesis import GenerationMode

from server.completion.completion_openapi import completion_document
from server.web.api import ServedModel
from tests.server.described import ask, in_a_thread, operations
from tests.server.test_completions import site
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

EXAMPLES = 10
OPERATIONS = operations(completion_document(ServedModel("m", 36, 64, 257), with_key=False))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_llama(tmp_path_factory.mktemp("llama") / "model")

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        async with site(folder) as made:
            yield made.url

    with in_a_thread(serving) as at:
        yield at


@pytest.mark.parametrize("label", ["POST /v1/completions", "POST /v1/chat/completions"])
def test_what_it_says_is_wrong_is_refused(label: str, url: str) -> None:
    ask(OPERATIONS[label], GenerationMode.NEGATIVE, url, EXAMPLES)


def test_all_routes_are_described() -> None:
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"} <= {*OPERATIONS}
    assert "POST /v1/embeddings" not in OPERATIONS
