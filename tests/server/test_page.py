"""The page and its events: what is sent to whom, and that nobody who listens holds anything up."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from server.service import logs, page
from server.service.api import LONGEST_TEXT
from server.service.page import policy
from shm_broadcast import CoordinatorError
from tests.patience import auntil
from tests.server.fake_service import Pool, listening, run, site
from tests.server.test_http_connections import Raw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAGE = Path("server/data/page.html")
GET = b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n"


async def snapshots(answer: httpx.Response) -> AsyncIterator[Any]:
    """What the events say; ``None`` for the last one."""
    async for line in answer.aiter_lines():
        if line == "event: over":
            yield None
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def ended(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the access log says of events that have ended."""
    told = [vars(record)["facts"] for record in caplog.records if record.name == logs.ACCESS]
    return [each["path"] for each in told if each["path"] == "/events"]


async def test_the_page_is_one_file_that_may_do_nothing_but_show() -> None:
    async with site(api_key="secret") as here:
        for method in ("GET", "HEAD"):
            answer = await here.client.request(method, "/", headers={"accept": "text/css"})
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            said = answer.headers["content-security-policy"]
            assert said == policy(PAGE.read_text())
        assert said.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in said
        assert (await here.client.get("/events")).status_code == 401
    text = PAGE.read_text()
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]  # a name only
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert forbidden not in text
    assert not re.search(r"\son\w+=|\sstyle=", text)  # the policy would not let them run


async def test_the_status_says_what_the_page_shows() -> None:
    async with site() as here:
        assert (await here.embed("abc")).status_code == 200
        assert (await here.embed("boom")).status_code == 500
        seen = (await here.client.get("/status")).json()
        assert seen["grid"] == {"dp": 1, "pp": 1, "pcp": 1, "tp": 2}
        assert [each["place"]["tp"] for each in seen["workers"]] == [0, 1]
        assert seen["totals"]["requests"] == {"200": 1, "500": 1}
        assert seen["totals"]["calls"] == {"ok": 2, "error": 1}
        assert seen["totals"]["latencies"][-1] == ["+Inf", 1]
        assert "ValueError: boom" in seen["last_failure"]["text"]
        assert seen["verdict"] == []


async def test_a_failure_with_a_long_message_is_cut() -> None:
    async with site() as here:
        here.pool.failure = CoordinatorError("<b>" * 1_000_000)
        here.pool.last_failure = time.time(), here.pool.failure
        seen = here.service.status()
        for text in (seen["failure"], seen["reason"], seen["last_failure"]["text"]):
            assert len(text) < LONGEST_TEXT + 50
            assert text.endswith("characters more")


def test_all_listeners_get_the_same_snapshots_and_the_end() -> None:
    taken = 0

    async def test() -> None:
        nonlocal taken
        async with site() as here:
            look = here.service.status

            def counted() -> dict[str, Any]:
                nonlocal taken
                taken += 1
                return look()

            here.service.status = counted
            async with httpx.AsyncClient(timeout=60) as client:
                heard: list[list[Any]] = []

                async def listen(url: str) -> None:
                    async with client.stream("GET", f"{url}/events") as answer:
                        assert answer.headers["content-type"].startswith("text/event-stream")
                        mine: list[Any] = []
                        heard.append(mine)
                        async for seen in snapshots(answer):
                            mine += [seen]

                async with listening(here) as url:
                    listeners = [asyncio.create_task(listen(url)) for _ in range(50)]
                    await auntil(lambda: len(heard) == 50 and all(len(m) > 2 for m in heard))
                await asyncio.gather(*listeners)  # the server has ended, in the middle of them
            assert all(mine[-1] is None for mine in heard)
            moments = {seen["now"] for mine in heard for seen in mine if seen is not None}
            assert len(moments) <= taken
            before = taken
            await asyncio.sleep(1.2)
            assert taken == before  # nobody listens

    run(test)


async def test_who_listens_and_does_not_read_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshots of a megabyte fill what lies between the server and a client at once."""
    caplog.set_level(logging.INFO, logs.ACCESS)
    monkeypatch.setattr(page, "_SECONDS", 0.01)

    async with site() as here, listening(here, send_seconds=1.0) as url:
        look = here.service.status
        here.service.status = lambda: {**look(), "padding": "x" * 1_000_000}
        async with Raw(url) as deaf, httpx.AsyncClient(timeout=60) as client:
            deaf.read_no_more()
            deaf.writer.write(GET)
            async with client.stream("GET", f"{url}/events") as answer:
                got = 0
                async for seen in snapshots(answer):
                    assert seen["state"] == "ready"
                    got += 1
                    if got == 50:
                        break
            assert (await client.get(f"{url}/health")).status_code == 200
            await auntil(lambda: len(ended(caplog)) == 2)


async def test_so_many_may_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LISTENERS", 2)

    async with (
        site() as here,
        listening(here) as url,
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", f"{url}/events") as first,
    ):
        assert first.status_code == 200
        async with client.stream("GET", f"{url}/events") as second:
            assert second.status_code == 200
            refused = await client.get(f"{url}/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        while (again := await client.send(
            client.build_request("GET", f"{url}/events"), stream=True
        )).status_code != 200:  # fmt: skip
            await again.aclose()
        await again.aclose()


@pytest.mark.parametrize(
    ("sent", "begins"),
    [
        (b"HEAD /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"HTTP/1.1 200"),
        (b"HEAD / HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
        (b"POST /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"HTTP/1.1 405"),
    ],
)
async def test_what_has_an_end_ends(sent: bytes, begins: bytes) -> None:
    async with site() as here, listening(here) as url, Raw(url) as client:
        client.writer.write(sent)
        rest = await client.rest()
        assert rest.startswith(begins)
        assert b"POST" in sent or rest.endswith(b"\r\n\r\n")  # no body


async def test_events_over_http_1_0_and_after_a_half_close() -> None:
    async with site() as here, listening(here) as url:
        async with Raw(url) as old:
            old.writer.write(b"GET /events HTTP/1.0\r\n\r\n")
            head = await old.line_with(b"data: ")
            assert json.loads(head.removeprefix(b"data: "))["state"] == "ready"
        async with Raw(url) as half:
            half.writer.write(GET)
            half.writer.write_eof()
            assert b"ready" in await half.line_with(b"data: ")


async def test_a_service_that_breaks_shows_it_until_it_ends() -> None:
    async with site() as here, listening(here) as url, httpx.AsyncClient(timeout=60) as client:
        async with client.stream("GET", f"{url}/events") as answer:
            async for seen in snapshots(answer):
                if seen["state"] == "failed":
                    break
                here.pool.kill()
        assert "killed by SIGKILL" in seen["reason"]
        assert "killed by SIGKILL" in seen["last_failure"]["text"]


async def test_a_snapshot_that_cannot_be_taken_is_told_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page, "_SECONDS", 0.01)

    async with site() as here, listening(here) as url, httpx.AsyncClient(timeout=60) as client:
        pool, here.service._pool = here.service._pool, "nonsense"
        async with client.stream("GET", f"{url}/events") as answer:
            await auntil(lambda: "cannot be shown" in caplog.text)
            here.service._pool = pool
            async for seen in snapshots(answer):
                assert seen["state"] == "ready"
                break


async def test_the_page_before_the_workers_run() -> None:
    def start(pool: Pool) -> Pool:
        raise FileNotFoundError("no such model")

    async with site(start=start) as here:
        seen = (await here.client.get("/status")).json()
        assert (seen["grid"], seen["workers"]) == ({}, [])
        assert seen["reason"] == "no such model"
