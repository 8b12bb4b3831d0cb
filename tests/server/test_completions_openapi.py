"""The service of completions against its own OpenAPI document."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from schemathesis import GenerationMode

from server.service.api import ApiError, ServedModel
from server.service.completions import (
    PLAIN,
    CompletionApp,
    read_chat,
    read_completion,
)
from tests.server.described import ask, check_routes, in_a_thread, operations
from tests.server.test_completions import site
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

EXAMPLES = 40
LENGTH = 4096
MODEL = ServedModel("m", 36, LENGTH, 257)
UNUSED: Any = None
APP = CompletionApp(UNUSED, MODEL, api_key=None)
DOCUMENT = APP.openapi()
OPERATIONS = operations(DOCUMENT)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
READ: dict[str, Callable[[bytes, ServedModel], object]] = {
    COMPLETION: read_completion,
    CHAT: read_chat,
}
ASKED: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
TYPED = {
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
}
SIMPLE: tuple[Any, ...] = (None, True, False, -1, 0, 1, 2, 0.5, "", "x", [], ["x"], {}, {"x": 1})
VALUES = (*SIMPLE, {"type": "text"}, {"type": "json_object"}, ["x"] * 4, ["x"] * 5, [""])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a model that takes long prompts, and says nothing: every token ends its answers."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    make_llama(folder, max_position_embeddings=LENGTH, eos_token_id=list(range(257)))

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        async with site(folder, length=LENGTH, max_tokens=512) as made:
            yield made.url

    with in_a_thread(serving) as at:
        yield at


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", READ)
def test_what_it_answers_is_what_it_says(path: str, mode: GenerationMode, url: str) -> None:
    ask(OPERATIONS[f"POST {path}"], mode, url, EXAMPLES)


@pytest.mark.parametrize("field", sorted(TYPED | {*PLAIN}))
@pytest.mark.parametrize("path", READ)
def test_the_document_allows_what_is_taken(path: str, field: str) -> None:
    """Also of fields that are there only to be refused, on which no generator comes often."""
    asked = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    components = {"components": DOCUMENT["components"]}
    allowed = jsonschema_rs.validator_for({**asked["schema"], **components})
    wrong = []
    for value in VALUES:
        body = {"model": "m", **ASKED[path], field: value}
        try:
            READ[path](json.dumps(body).encode(), MODEL)
        except ApiError:
            taken = False
        else:
            taken = True
        if allowed.is_valid(body) != taken:
            wrong.append((value, taken))
    assert wrong == []


def test_all_routes_are_described() -> None:
    check_routes(APP)
