"""A service against its own OpenAPI document: schemathesis asks what it allows, and what not."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from starlette.routing import Route

from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from server.service.app import ServiceApp


def operations(document: dict[str, Any]) -> dict[str, Any]:
    """What a document describes, by method and path."""
    found = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
    return {each.label: each for each in found}


def check_routes(app: ServiceApp[Any]) -> None:
    """The routes are those that the document describes, and its own."""
    answered = {
        f"{method} {route.path.replace(':path', '')}"
        for route in app.app().routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert answered == {*operations(app.openapi()), "GET /openapi.json"}


def ask(operation: Any, mode: GenerationMode, url: str, examples: int) -> None:
    """Send requests as the document describes them, or others, and compare the answers with it."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = _whole(case.body)
        case.call_and_validate(base_url=url, timeout=PATIENCE_SECONDS)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a GET without parameters cannot be wrong


@contextmanager
def in_a_thread(serving: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """The URL of a service that runs in a thread of its own meanwhile."""
    url: Future[str] = Future()
    over = threading.Event()

    async def serve() -> None:
        async with serving() as at:
            url.set_result(at)
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(lambda: asyncio.run(serve()))
        ended.add_done_callback(lambda _: url.cancel())  # so that nobody waits for it any longer
        try:
            yield url.result(PATIENCE_SECONDS)
        finally:
            over.set()
            ended.result(PATIENCE_SECONDS)


def _whole(content: Any) -> Any:
    """JSON with 4 in place of 4.0: JSON Schema takes that for an integer too, the service does not.

    What is no content, as of a GET, stays as it is.
    """
    match content:
        case dict():
            return {name: _whole(value) for name, value in content.items()}
        case list():
            return [_whole(item) for item in content]
        case float() if content.is_integer():
            return int(content)
    return content
