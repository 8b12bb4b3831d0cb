"""Sockets of the service: clients that are many, disconnect, exceed limits, or send too much."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import pytest

from benchmarks.http_load import Client
from server.service.app import MAX_BODY_BYTES
from tests.patience import auntil
from tests.server.fake_service import Site, listening, site

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.quick

BODY = json.dumps({"model": "m", "input": "abc"}).encode()
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Raw:
    """A connection that sends the bytes it is given."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def answer(self, request: bytes) -> bytes:
        """All that the server sends after ``request`` until it closes."""
        self.writer.write(request)
        return await self.reader.read()


def counted_one(here: Site, status: str) -> bool:
    return here.samples().get(("service_requests_total", status)) == 1


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, abort])
async def test_a_client_that_leaves_is_dropped_from_what_waits(
    leave: Callable[[asyncio.StreamWriter], None],
) -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays, Raw(url) as left:
        here.pool.held = []
        first = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.pool.held)
        left.writer.write(HEAD + BODY)
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        leave(left.writer)
        await auntil(lambda: here.service.status()["items_waiting"] == 0)
        here.pool.let_go()
        assert (await first)[0] == 200
        assert (await stays.embed(["after"]))[0] == 200
        assert here.pool.batches == [["stays"], ["after"]]
        assert counted_one(here, "499")


async def test_a_client_that_leaves_during_its_batch_harms_no_other() -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays, Raw(url) as left:
        here.pool.held = []
        left.writer.write(HEAD + BODY)
        await auntil(lambda: here.pool.held)
        second = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        left.writer.close()
        await auntil(lambda: counted_one(here, "499"))
        here.pool.let_go()
        assert (await second)[0] == 200
        assert here.pool.batches == [["abc"], ["stays"]]


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    limits = {"max_tokens": 10_000, "max_waiting": 4096, "in_flight": 3}
    async with site(**limits) as here, listening(here) as url:

        async def ask(number: int) -> None:
            choice = random.Random(number)
            async with Client(url, "m") as client:
                for turn in range(5):
                    sizes = [1000 * turn + number, *choice.choices(range(500), k=turn % 3)]
                    client.send(["x" * size for size in sizes], "float")
                    _, answer = await client.receive()
                    got = [entry["embedding"] for entry in answer["data"]]
                    assert got == [[float(size)] for size in sizes]
                    assert answer["usage"]["prompt_tokens"] == sum(sizes)

        await asyncio.gather(*(ask(number) for number in range(60)))
        assert max(sum(map(len, batch)) for batch in here.pool.batches) <= 10_000
        assert here.service.status()["items_waiting"] == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_while_it_is_sent(chunked: bool) -> None:
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d"
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n"
    piece = b" " * (1 << 20)

    async def send(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"100000\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()

    async with site() as here, listening(here) as url, Raw(url) as large:
        large.writer.write(head if chunked else head % (4 * MAX_BODY_BYTES))
        sending = asyncio.create_task(send(large.writer))
        answer = await large.reader.read(1 << 16)
        sending.cancel()
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b"the body has more than" in answer
        async with Client(url, "m") as client:
            assert (await client.embed(["x"]))[0] == 200


async def test_connections_beyond_the_limit_get_503_until_there_is_room() -> None:
    async with site() as here, listening(here, connections=1) as url, Raw(url) as asks:
        here.pool.held = []
        last = HEAD.replace(b"host", b"connection: close\r\nhost") + BODY
        asked = asyncio.create_task(asks.answer(last))
        await auntil(lambda: here.pool.held)
        async with Raw(url) as beyond:
            assert (await beyond.answer(HEALTH)).startswith(b"HTTP/1.1 503 ")
        here.pool.let_go()
        assert (await asked).startswith(b"HTTP/1.1 200 ")
        async with Raw(url) as later:
            assert (await later.answer(HEALTH)).startswith(b"HTTP/1.1 200 ")


CHUNKED = HEAD.replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (HEAD.replace(b"host", b"content-length: 1\r\nhost"), 400),
        (CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) + HEALTH, 400),
        (b"GET /health HTTP/1.1\r\nhost: " + b"x" * (64 << 10), 400),
        (HEALTH.replace(b"close", b"close, upgrade\r\nupgrade: websocket"), 200),
    ],
    ids=["TLS", "no host", "two lengths", "chunks and a length", "long head", "upgrade"],
)
async def test_a_connection_that_is_no_http_gets_400_alone(sent: bytes, status: int) -> None:
    """A proxy may see other requests in a body of two lengths than the server does."""
    async with site() as here, listening(here) as url, Raw(url) as wrong:
        here.pool.held = []
        answer = await wrong.answer(sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
        assert here.pool.held == []
