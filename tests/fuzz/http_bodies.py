"""Bodies of requests: nearly right ones, and any bytes, through a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from hypothesis import strategies as st

from tests.server.fake_service import listening, site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["m", "float", "base64", "boom", "\ud800", "\0"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
_INPUTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=20), max_size=5),
    st.lists(st.integers(0, 8), max_size=5),
    st.lists(st.lists(st.integers(-1, 9), max_size=5), max_size=3),
    _VALUES,
)
_FIELDS = ("encoding_format", "dimensions", "user", "truncate", "other")


@st.composite
def bodies(draw: Draw) -> bytes:
    """A body that an embeddings request may have, or should not."""
    request = {"model": draw(st.just("m") | _VALUES), "input": draw(_INPUTS)}
    for field in draw(st.lists(st.sampled_from(_FIELDS), max_size=2)):
        request[field] = draw(_VALUES)
    text = json.dumps(request, ensure_ascii=draw(st.booleans()))
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@contextmanager
def served() -> Iterator[Callable[[bytes], None]]:
    """A service; the function sends it a body, and raises unless it answers as it should."""
    found: list[str] = []
    here, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with site(max_waiting=4096) as service, listening(service) as at:
            found.append(at)
            here.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert here.wait(30)
        with httpx.Client(base_url=found[0], timeout=30) as client:
            yield lambda body: _check(client, body)
    finally:
        over.set()
        thread.join()


def _check(client: httpx.Client, body: bytes) -> None:
    answer = client.post(
        "/v1/embeddings", content=body, headers={"content-type": "application/json"}
    )
    told = answer.json()
    if answer.status_code == 200:
        given = json.loads(body)["input"]
        several = isinstance(given, list) and not (given and isinstance(given[0], int))
        assert [each["index"] for each in told["data"]] == list(range(len(given) if several else 1))
    elif answer.status_code == 500:
        assert b"boom" in body, told  # which the service's worker fails at
    else:
        assert answer.status_code in (400, 404), (answer.status_code, told)
        assert told["error"]["message"]
