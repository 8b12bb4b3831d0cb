"""The service of embeddings against its own OpenAPI document."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from schemathesis import GenerationMode

from tests.server.described import ask, check_routes, in_a_thread, operations
from tests.server.fake_service import app_of, listening, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

EXAMPLES = 40
UNUSED: Any = None
APP = app_of(UNUSED)
OPERATIONS = operations(APP.openapi())


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    async with site(max_waiting=4096) as service, listening(service) as at:
        yield at


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_a_thread(serving) as at:
        yield at


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_what_it_answers_is_what_it_says(label: str, mode: GenerationMode, url: str) -> None:
    ask(OPERATIONS[label], mode, url, EXAMPLES)


def test_all_routes_are_described() -> None:
    check_routes(APP)
