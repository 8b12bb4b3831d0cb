"""The page in a real browser: Chromium, driven by Playwright; skipped where either is missing.

With ``PAGE_SCREENSHOTS`` set to a folder, what it looks like is left there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from coordinator.rank_grid import RankGrid
from server.config import PACKAGED_NAME
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_service import Site, listening, run, site
from tests.server.served import ForkedServed
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE = {"width": 380, "height": 800}
SHOTS = os.environ.get("PAGE_SCREENSHOTS")
EVIL = (
    "</p><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
    "<svg onload='window.evil = 3'><a href='javascript:evil()'>"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Looker:
    """A page that is open, and what went wrong in it."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.page.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type == "error" else None
        )
        self.page.goto(url)

    def until(self, selector: str) -> None:
        """Return once there is such an element, and it is seen."""
        self.page.wait_for_selector(selector)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def shoot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


@contextmanager
def asked_all_the_time(url: str) -> Iterator[None]:
    """A client asks for one embedding after another."""
    over = threading.Event()

    def ask() -> None:
        body = {"model": PACKAGED_NAME, "input": ["The harbour wakes."] * 3}
        with httpx.Client(timeout=60) as client:
            while not over.is_set():
                client.post(f"{url}/v1/embeddings", json=body)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_is_seen_of_ranks_that_work_stop_and_die(browser: Browser) -> None:
    options = ("--tp", "2", "--pp", "2", "--restart", "worker", "--stall-timeout", "2")
    with ForkedServed(*options) as served:
        wide = Looker(browser, served.url, viewport={"width": 1100, "height": 800})
        served.wait_until_ready()
        pids = served.worker_pids()
        wide.until("#state.ready")
        assert wide.text("#model") == PACKAGED_NAME
        assert wide.text("#grid") == "dp 1, pp 2, tp 2"
        assert wide.page.locator("td").count() == 4
        assert f"rank 2, pid {pids[2]}" in wide.text("tr:nth-child(3) td")
        with asked_all_the_time(served.url):
            wide.page.click("#go")
            wide.until("#found b")
            assert wide.page.locator("#found b").all_inner_texts()[0] == "1.00"
            assert "3 vectors of 384 numbers" in wide.text("#found")
            wide.until("polyline")
            wide.shoot("healthy")
            phone = Looker(browser, served.url, viewport=PHONE)
            dark = Looker(browser, served.url, viewport=PHONE, color_scheme="dark")
            for each, name in ((phone, "phone"), (dark, "dark")):
                each.until("td")
                fits = each.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                assert fits, "the page is wider than the phone"
                each.shoot(name)
            light, night = (
                each.page.evaluate("getComputedStyle(document.body).backgroundColor")
                for each in (phone, dark)
            )
            assert light != night
            psutil.Process(pids[1]).suspend()
            wide.until("#state.stalled")
            wide.until("#verdict:not([hidden])")
            assert f"Rank 1 (pid {pids[1]}) holds up others" in wide.text("#verdict")
            assert f"pid {pids[1]}" in wide.text("td.stopped")
            wide.shoot("stopped")
            psutil.Process(pids[1]).resume()
            wide.until("#state.ready")
            psutil.Process(pids[2]).kill()
            wide.until("#failed:not([hidden])")
            assert f"rank 2 (pid {pids[2]}): killed by SIGKILL" in wide.text("#failure")
            wide.until("#state.ready")
            wide.until(f"td:has-text('pid {served.worker_pids()[2]}')")
            wide.shoot("replaced")
        assert [each.wrong for each in (wide, phone, dark)] == [[], [], []]
        served.process.send_signal(signal.SIGTERM)
        wide.until("#state.gone")
        assert served.finish()[0] == 0
        wide.page.close()
        phone.page.close()
        dark.page.close()


@contextmanager
def played(api_key: str | None = None) -> Iterator[tuple[Site, str]]:
    """A service that is played, in a thread of its own."""
    found: list[tuple[Site, str]] = []
    here, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with site() as service, listening(service, api_key=api_key) as at:
            found.append((service, at))
            here.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=run, args=(serve,))
    thread.start()
    assert here.wait(PATIENCE_SECONDS)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()


def test_markup_in_what_is_shown_stays_text(browser: Browser) -> None:
    with played() as (here, url):
        here.pool.break_with(EVIL)
        looker = Looker(browser, url)
        looker.until("#state.failed")
        for selector in ("#reason", "#failure", "td .operation"):
            assert EVIL in looker.text(selector)
        looker.page.fill("#text", EVIL)
        looker.page.click("#go")
        looker.until("#found .bad")
        looker.until("#found >> text=evil")
        assert looker.page.evaluate("window.evil === undefined")
        assert looker.page.locator("img, a[href^=j]").count() == 0
        assert looker.page.evaluate("document.scripts.length") == 1
        assert all("503" in each for each in looker.wrong)
        looker.page.close()


def test_a_script_that_is_put_in_by_force_is_not_run(browser: Browser) -> None:
    """The policy holds even if the page itself were wrong."""
    with played() as (_, url):
        looker = Looker(browser, url)
        looker.until("#state.ready")
        looker.page.evaluate(
            "evil => { document.body.insertAdjacentHTML('beforeend', evil);"
            " document.body.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.evil = 4'})); }",
            EVIL,
        )
        looker.page.wait_for_function("document.scripts.length === 3")
        assert looker.page.evaluate("window.evil === undefined")
        assert any("Content Security Policy" in each for each in looker.wrong)
        looker.page.close()


def test_axes_of_ones_own_are_shown_as_blocks(browser: Browser) -> None:
    with played() as (here, url):
        here.pool.grid = RankGrid.of({"cfg": 2, "dp": 1, "pp": 1, "pcp": 1, "tp": 1})
        looker = Looker(browser, url)
        looker.until("#grid:has-text('cfg 2, dp 1, pp 1, tp 1')")
        blocks = looker.page.locator(".replica").all_inner_texts()
        assert [text.split("\n")[0] for text in blocks] == ["cfg 0", "cfg 1"]
        assert [f"rank {n}" in text for n, text in enumerate(blocks)] == [True, True]
        looker.page.close()


def test_the_key_is_asked_for(browser: Browser) -> None:
    with played(api_key="secret") as (_, url):
        looker = Looker(browser, url)
        looker.until("#key")
        assert looker.page.locator("td").count() == 0
        for key, shown in (("wrong", "#link:has-text('not the service')"), ("secret", "td")):
            looker.page.fill("#key", key)
            looker.page.click("#ask button")
            looker.until(shown)
        looker.page.click("#go")
        looker.until("#found b")
        looker.page.close()


def test_a_model_that_completes_is_tried_with_a_completion(
    browser: Browser, tmp_path: Path
) -> None:
    make_llama(tmp_path)
    with ForkedServed("--model", str(tmp_path)) as served:
        served.wait_until_ready()
        looker = Looker(browser, served.url)
        looker.until("#go:has-text('Go on')")
        looker.page.click("#go")
        looker.until("#found p:has-text('tokens in')")
        assert looker.wrong == []
        looker.page.close()
