"""The page at ``/``, also in Chromium, by Playwright, where both are installed."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from coordinator.rank_grid import RankGrid
from server.config import PACKAGED_NAME
from server.service.page import policy
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_service import Site, in_a_thread, listening, site
from tests.server.served import ForkedServed
from tests.server.test_completions import site as completing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGE = Path("server/data/page.html")
PHONE = {"width": 380, "height": 800}
EVIL = (
    "</p><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
    "<svg onload='window.evil = 3'><a href='javascript:evil()'>"
)


async def test_the_page_is_one_file_that_may_run_only_its_own_script() -> None:
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


@contextmanager
def asked_all_the_time(url: str) -> Iterator[None]:
    """A client asks for one embedding after another, ten a second at most."""
    over = threading.Event()

    def ask() -> None:
        body = {"model": PACKAGED_NAME, "input": ["The harbour wakes."] * 3}
        with httpx.Client(timeout=60) as client:
            while not over.wait(0.1):
                client.post(f"{url}/v1/embeddings", json=body)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_ranks_that_work_stop_and_die_are_shown(browser: Browser) -> None:
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
            phone = Looker(browser, served.url, viewport=PHONE, color_scheme="dark")
            phone.until("td")
            fits = phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert fits, "the page is wider than the phone"
            light, night = (
                each.page.evaluate("getComputedStyle(document.body).backgroundColor")
                for each in (wide, phone)
            )
            assert light != night
            psutil.Process(pids[1]).suspend()
            wide.until("#state.stalled")
            wide.until("#verdict:not([hidden])")
            assert f"Rank 1 (pid {pids[1]}) holds up others" in wide.text("#verdict")
            assert f"pid {pids[1]}" in wide.text("td.stopped")
            psutil.Process(pids[1]).resume()
            wide.until("#state.ready")
            psutil.Process(pids[2]).kill()
            wide.until("#failed:not([hidden])")
            assert f"rank 2 (pid {pids[2]}): killed by SIGKILL" in wide.text("#failure")
            wide.until("#state.ready")
            wide.until(f"td:has-text('pid {served.worker_pids()[2]}')")
        assert [each.wrong for each in (wide, phone)] == [[], []]
        served.process.send_signal(signal.SIGTERM)
        wide.until("#state.gone")
        assert served.finish()[0] == 0
        wide.page.close()
        phone.page.close()


@asynccontextmanager
async def played(api_key: str | None = None) -> AsyncIterator[tuple[Site, str]]:
    async with site() as service, listening(service, api_key=api_key) as url:
        yield service, url


def test_markup_in_messages_stays_text(browser: Browser) -> None:
    with in_a_thread(played()) as (here, url):
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


def test_the_policy_blocks_a_script_inserted_by_force(browser: Browser) -> None:
    with in_a_thread(played()) as (_, url):
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


def test_own_axes_are_shown_as_blocks(browser: Browser) -> None:
    with in_a_thread(played()) as (here, url):
        here.pool.grid = RankGrid.of({"cfg": 2, "dp": 1, "pp": 1, "pcp": 1, "tp": 1})
        looker = Looker(browser, url)
        looker.until("#grid:has-text('cfg 2, dp 1, pp 1, tp 1')")
        blocks = looker.page.locator(".replica").all_inner_texts()
        assert [text.split("\n")[0] for text in blocks] == ["cfg 0", "cfg 1"]
        assert [f"rank {n}" in text for n, text in enumerate(blocks)] == [True, True]
        looker.page.close()


def test_the_page_asks_for_the_key(browser: Browser) -> None:
    with in_a_thread(played(api_key="secret")) as (_, url):
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


def test_a_model_that_completes_is_tried_with_a_completion(browser: Browser, llama: Path) -> None:
    with in_a_thread(completing(llama)) as here:
        looker = Looker(browser, here.url)
        looker.until("#go:has-text('Go on')")
        looker.page.click("#go")
        looker.until("#found p:has-text('tokens in')")
        assert looker.wrong == []
        looker.page.close()
