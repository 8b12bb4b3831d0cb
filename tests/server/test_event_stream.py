"""Server-sent events as an answer, without a server."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect

from server.service.page import COMMENT, EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}
HEADERS = {
    b"content-type": b"text/event-stream; charset=utf-8",
    b"cache-control": b"no-store",
    b"x-accel-buffering": b"no",
}


class Answer:
    """A stream of two events, and what happens to it. The second one comes when that was told."""

    def __init__(self, awaited: object = b"one") -> None:
        self.told: list[Any] = []
        self.awaited = awaited
        self.stream = EventStream(self.events(), self.meanwhile())

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        self.told.append("entered")
        try:
            yield
        finally:
            self.told.append("left")

    async def events(self) -> AsyncIterator[bytes]:
        yield b"one"
        while self.told[-1] != self.awaited:
            await asyncio.sleep(0.001)
        yield b"two"

    async def send(self, message: Any) -> None:
        self.told.append(message.get("body", dict(message.get("headers", ()))))

    def run(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        asyncio.run(asyncio.wait_for(self.stream(SCOPE, receive, send), 60))


def test_events_are_sent_as_they_come() -> None:
    answer = Answer()
    assert answer.told == []
    answer.run(answer.send)
    assert answer.told == ["entered", HEADERS, b"one", b"two", b"", "left"]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_it_is_left_when_the_client_has_gone(last: int) -> None:
    answer = Answer()

    async def send(message: Any) -> None:
        if len(answer.told) > last:
            raise OSError
        await answer.send(message)

    with pytest.raises(ClientDisconnect):
        answer.run(send)
    assert (answer.told[0], answer.told[-1], len(answer.told)) == ("entered", "left", 2 + last)


def test_comments_are_sent_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a client which has left is noticed; but none before the head, or after the end."""
    monkeypatch.setattr("server.service.page.SILENT_SECONDS", 0.01)
    answer = Answer(awaited=COMMENT)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(0.1)
        await answer.send(message)

    answer.run(send)
    silence = answer.told.index(b"two") - 3
    assert silence >= 1
    assert answer.told == [
        "entered", HEADERS, b"one", *[COMMENT] * silence, b"two", b"", "left"
    ]  # fmt: skip


def test_head_has_the_same_headers() -> None:
    assert HEADERS.items() <= dict(EventStream.head().raw_headers).items()
