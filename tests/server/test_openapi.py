"""Every service against its own OpenAPI document: schemathesis sends what it allows, and more."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from shutil import copytree
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from starlette.routing import Route

from server.service.api import ApiError, ServedModel
from server.service.completions import PLAIN, CompletionApp, read_chat, read_completion
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_service import app_of, in_a_thread, listening, site
from tests.server.test_completions import site as completing
from tests.server.tiny_bert import edit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

EXAMPLES = 15
LENGTH = 4096
MODEL = ServedModel("m", 36, LENGTH, 257)
UNUSED: Any = None
APPS: dict[str, Any] = {
    "embeddings": app_of(UNUSED),
    "completions": CompletionApp(UNUSED, MODEL, api_key=None),
}
DOCUMENTS = {kind: app.openapi() for kind, app in APPS.items()}
OPERATIONS = {
    kind: {
        each.ok().label: each.ok()
        for each in schemathesis.openapi.from_dict(document).get_all_operations()
    }
    for kind, document in DOCUMENTS.items()
}

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
READ: dict[str, Callable[[bytes, ServedModel], object]] = {
    COMPLETION: read_completion,
    CHAT: read_chat,
}
ASKED: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
TYPED = "max_tokens max_completion_tokens temperature top_p top_k seed stop stream stream_options"
SIMPLE: tuple[Any, ...] = (None, True, False, -1, 0, 1, 2, 0.5, "", "x", [], ["x"], {}, {"x": 1})
VALUES = (*SIMPLE, {"type": "text"}, {"type": "json_object"}, ["x"] * 4, ["x"] * 5, [""])


@asynccontextmanager
async def embeddings() -> AsyncIterator[str]:
    async with site(max_waiting=4096) as service, listening(service) as at:
        yield at


@asynccontextmanager
async def completions(folder: Path) -> AsyncIterator[str]:
    """Of a model that takes long prompts; every token ends its answers."""
    edit(folder / "config.json", max_position_embeddings=LENGTH)
    edit(folder / "generation_config.json", eos_token_id=list(range(257)))
    async with completing(folder, length=LENGTH, max_tokens=512) as made:
        yield made.url


@pytest.fixture(scope="module")
def urls(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = copytree(llama, tmp_path_factory.mktemp("long") / "model")
    with in_a_thread(embeddings()) as one, in_a_thread(completions(folder)) as other:
        yield {"embeddings": one, "completions": other}


def whole(content: Any) -> Any:
    """JSON with 4 in place of 4.0: JSON Schema takes that for an integer too, the service does not.

    What is no content, as of a GET, stays as it is.
    """
    match content:
        case dict():
            return {name: whole(value) for name, value in content.items()}
        case list():
            return [whole(item) for item in content]
        case float() if content.is_integer():
            return int(content)
    return content


ASKED_OF = [
    *(("embeddings", label) for label in OPERATIONS["embeddings"]),
    *(("completions", f"POST {path}") for path in READ),
]


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("kind", "label"), ASKED_OF)
def test_answers_are_as_the_document_describes_them(
    kind: str, label: str, mode: GenerationMode, urls: dict[str, str]
) -> None:
    @given(case=OPERATIONS[kind][label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = whole(case.body)
        case.call_and_validate(base_url=urls[kind], timeout=PATIENCE_SECONDS)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a GET without parameters cannot be wrong


@pytest.mark.parametrize("field", sorted({*TYPED.split(), *PLAIN}))
@pytest.mark.parametrize("path", READ)
def test_the_document_allows_exactly_the_values_that_are_taken(path: str, field: str) -> None:
    """Also of fields that exist only to be refused, which a generator seldom reaches."""
    document = DOCUMENTS["completions"]
    asked = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    allowed = jsonschema_rs.validator_for({**asked["schema"], "components": document["components"]})
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


@pytest.mark.parametrize("kind", APPS)
def test_the_document_describes_every_route(kind: str) -> None:
    answered = {
        f"{method} {route.path.replace(':path', '')}"
        for route in APPS[kind].app().routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert answered == {*OPERATIONS[kind], "GET /openapi.json"}
