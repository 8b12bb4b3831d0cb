"""Connections: more than allowed, of other protocols, and of clients that leave; real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Self

import pytest

from tests.patience import auntil
from tests.server.fake_service import Site, listening, site

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = json.dumps({"model": "m", "input": "abc"}).encode()
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def closing(request: bytes) -> bytes:
    """The same as the last request of its connection."""
    return request.replace(b"host", b"connection: close\r\nhost")


class Raw:
    """A connection that says what it is told."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)

    async def __aenter__(self) -> Self:
        self._reader, self.writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await self._reader.read()


def requests_answered(here: Site, status: int) -> bool:
    line = f'service_requests_total{{status="{status}"}} 1.0'
    return line in here.service.metrics.expose().decode()


async def test_connections_beyond_the_limit_get_503_until_there_is_room() -> None:
    async with site() as here, listening(here, connections=1) as url, Raw(url) as asks:
        here.pool.held = []
        asks.writer.write(closing(HEAD + BODY))
        await auntil(lambda: here.pool.held)
        async with Raw(url) as beyond:
            beyond.writer.write(HEALTH)
            assert (await beyond.rest()).startswith(b"HTTP/1.1 503 ")
        here.pool.let_go()
        assert (await asks.rest()).startswith(b"HTTP/1.1 200 ")
        async with Raw(url) as later:
            later.writer.write(HEALTH)
            assert (await later.rest()).startswith(b"HTTP/1.1 200 ")


NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    HEAD.replace(b"host", b"content-length: 1\r\nhost"),
    b"GET /health HTTP/1.1\r\nhost: " + b"x" * (64 << 10),
)


@pytest.mark.parametrize("sent", NO_HTTP, ids=["tls", "no host", "two lengths", "long head"])
async def test_what_is_no_http_gets_400(sent: bytes) -> None:
    async with site() as here, listening(here) as url, Raw(url) as wrong:
        wrong.writer.write(sent)
        assert (await wrong.rest()).startswith(b"HTTP/1.1 400 ")


async def test_who_asks_for_another_protocol_gets_this_one() -> None:
    async with site() as here, listening(here) as url, Raw(url) as asks:
        asks.writer.write(HEALTH.replace(b"close", b"close, upgrade\r\nupgrade: websocket"))
        assert (await asks.rest()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_with_two_lengths_ends_the_connection() -> None:
    """A proxy may see other requests in it than the server does."""

    async with site() as here, listening(here) as url, Raw(url) as asks:
        here.pool.held = []
        chunked = b"transfer-encoding: chunked\r\ncontent-length"
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        asks.writer.write(HEAD.replace(b"content-length", chunked) + body + HEALTH)
        answer = await asks.rest()
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
        assert here.pool.held == []


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_who_has_left_is_not_computed_for(leave: str) -> None:
    def depart(writer: asyncio.StreamWriter) -> Callable[[], None]:
        return writer.close if leave == "close" else writer.transport.abort

    async with site() as here, listening(here) as url, Raw(url) as first, Raw(url) as leaves:
        here.pool.held = []
        first.writer.write(HEAD + BODY)
        await auntil(lambda: here.pool.held)
        leaves.writer.write(HEAD + BODY)
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        depart(leaves.writer)()
        await auntil(lambda: here.service.status()["items_waiting"] == 0)
        assert requests_answered(here, 499)
