"""The page and its data."""

from __future__ import annotations

import re
import time
from pathlib import Path

from server.service.api import LONGEST_TEXT
from server.service.page import policy
from shm_broadcast import CoordinatorError
from tests.server.fake_service import Pool, site

PAGE = Path("server/data/page.html")


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


async def test_the_page_before_the_workers_run() -> None:
    def start(pool: Pool) -> Pool:
        raise FileNotFoundError("no such model")

    async with site(start=start) as here:
        seen = (await here.client.get("/status")).json()
        assert (seen["grid"], seen["workers"]) == ({}, [])
        assert seen["reason"] == "no such model"
