"""Clients that are slow, hold connections, send half of something, or leave; real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self

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

    async def send_on(self) -> None:
        """Send more and more, if slowly."""
        while True:
            self.writer.write(b" ")
            await self.writer.drain()
            await asyncio.sleep(0.05)

    def read_no_more(self) -> None:
        """Leave what comes in the kernel."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def line_with(self, begin: bytes) -> bytes:
        """The next line that begins so."""
        while not (line := await self._reader.readline()).startswith(begin):
            assert line, f"no line begins with {begin!r}"
        return line

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await self._reader.read()


def requests_answered(here: Site, status: int) -> bool:
    line = f'service_requests_total{{status="{status}"}} 1.0'
    return line in here.service.metrics.expose().decode()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b"HTTP/1.1 408 "),
        (b"GET /health HT", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + BODY[:5], b"HTTP/1.1 408 "),
        (b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx", b"HTTP/1.1 405 "),
    ],
)
async def test_who_does_not_send_all_is_told_and_cut_off(sent: bytes, answer: bytes) -> None:
    limits = {"head_seconds": 0.5, "body_seconds": 0.5}
    async with site() as here, listening(here, **limits) as url, Raw(url) as slow:
        slow.writer.write(sent)
        assert (await slow.rest()).startswith(answer)


@pytest.mark.parametrize(
    ("at_once", "drop"), [(b"GET /health HTTP/1.1\r\nhost: ", b"x"), (HEAD, b" ")]
)
async def test_a_byte_now_and_then_gains_no_time(at_once: bytes, drop: bytes) -> None:
    limits = {"head_seconds": 0.5, "body_seconds": 0.5}
    async with site() as here, listening(here, **limits) as url, Raw(url) as slow:
        slow.writer.write(at_once)
        answer = asyncio.create_task(slow.rest())
        for _ in range(len(BODY) - 1):
            slow.writer.write(drop)
            await asyncio.sleep(0.1)
            if answer.done():
                break
        assert (await answer).startswith(b"HTTP/1.1 408 ")


async def test_who_does_not_take_the_answer_is_cut_off() -> None:
    async with site(max_waiting=5000) as here, listening(here, send_seconds=0.5) as url:
        many = json.dumps({"model": "m", "input": ["a"] * 2048}).encode()
        head = HEAD.replace(b": %d\r\n\r\n" % len(BODY), b": %d\r\n\r\n" % len(many))
        async with Raw(url) as deaf:
            for _ in range(200):  # more than the kernel and the reader hold
                deaf.writer.write(head + many)
            with pytest.raises(ConnectionError):
                await deaf.send_on()
        assert (await here.embed("x")).status_code == 200


@pytest.mark.parametrize("held", [b"", b"GET /hea", HEAD, HEAD + BODY[:3]])
async def test_those_that_hold_connections_give_way(held: bytes) -> None:
    async with site() as here, listening(here, connections=20) as url:
        holders = [await Raw(url).__aenter__() for _ in range(60)]
        for each in holders:
            each.writer.write(held)
        async with Raw(url) as asks:
            asks.writer.write(HEALTH)
            assert (await asks.rest()).startswith(b"HTTP/1.1 200 ")
        first = (await holders[0].rest())[:13]
        assert first in (b"HTTP/1.1 408 ", b"")
        for each in holders:
            await each.__aexit__()


async def test_those_that_wait_for_their_answer_do_not_give_way() -> None:
    limits = {"connections": 3, "spare": 2}
    async with site(max_waiting=50) as here, listening(here, **limits) as url:
        here.pool.held = []
        asking = [await Raw(url).__aenter__() for _ in range(3)]
        for each in asking:
            each.writer.write(closing(HEAD + BODY))
        await auntil(lambda: here.service.status()["items_waiting"] == 2)
        for path in (b"/health", b"/ready", b"/status", b"/metrics"):
            async with Raw(url) as idle, Raw(url) as probe:
                probe.writer.write(HEALTH.replace(b"/health", path))
                assert (await probe.rest()).startswith(b"HTTP/1.1 200 ")
                idle.read_no_more()
        for work in (closing(HEAD + BODY), HEALTH.replace(b"/health", b"/events")):
            async with Raw(url) as refused:
                refused.writer.write(work)
                answer = await refused.rest()
                assert answer.startswith(b"HTTP/1.1 503 ") and b'"overloaded"' in answer
        here.pool.let_go()
        for each in asking:
            assert (await each.rest()).startswith(b"HTTP/1.1 200 ")
            await each.__aexit__()
        assert requests_answered(here, 503)


@pytest.mark.parametrize("spare", [0, 1])
async def test_a_connection_beyond_the_limit_may_ask_again_once_there_is_room(spare: int) -> None:
    limits = {"connections": 1, "spare": spare}
    async with site() as here, listening(here, **limits) as url, Raw(url) as asks:
        here.pool.held = []
        asks.writer.write(closing(HEAD + BODY))
        await auntil(lambda: here.pool.held)
        async with Raw(url) as beyond:
            beyond.writer.write((HEAD + BODY) if spare else b"")
            assert b" 503 " in await beyond.line_with(b"HTTP/1.1 ")
            here.pool.let_go()
            assert (await asks.rest()).startswith(b"HTTP/1.1 200 ")
            async with Raw(url) as later:
                for each in (later, beyond) if spare else (later,):
                    each.writer.write(closing(HEAD + BODY))
                    assert b"HTTP/1.1 200 " in await each.rest()


async def test_who_asks_for_another_protocol_gets_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with site() as here, listening(here) as url, Raw(url) as asks:
        asks.writer.write(HEALTH.replace(b"close", b"close, upgrade\r\nupgrade: websocket"))
        assert (await asks.rest()).startswith(b"HTTP/1.1 200 ")
    assert [each for each in caplog.records if each.name.startswith("uvicorn")] == []


@pytest.mark.parametrize(
    ("target", "status"),
    [(b"http://site/health", 200), (b"HTTP://site?x", 200), (b"http://site/n%41", 404)],
)
async def test_a_target_may_name_the_host(target: bytes, status: int) -> None:
    async with site() as here, listening(here) as url, Raw(url) as asks:
        asks.writer.write(HEALTH.replace(b"/health", target))
        answer = await asks.rest()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert status == 200 or b"no GET /nA here" in answer


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


async def test_who_has_shut_down_its_sending_side_gets_its_answer() -> None:
    async with site() as here, listening(here) as url, Raw(url) as half:
        here.pool.held = []
        half.writer.write(HEAD + BODY)
        half.writer.write_eof()
        await auntil(lambda: here.pool.held)
        await asyncio.sleep(0.5)  # it is looked at meanwhile
        here.pool.let_go()
        answer = await half.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"embedding":[3.0]' in answer
        async with Raw(url) as both:
            both.writer.write(HEAD + BODY + HEALTH.replace(b"connection: close\r\n", b""))
            both.writer.write_eof()
            assert (await both.rest()).count(b"HTTP/1.1 200 OK\r\n") == 2


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
