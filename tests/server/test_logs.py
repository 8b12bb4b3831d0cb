"""What the service writes: its log, a line for each request with its id, a bar while it loads."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from server.commands.progress import ProgressBar
from server.service import logs
from tests.server.fake_service import site

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


FACTS = {"facts": {"client": "", "method": "GET", "path": "/"}}


async def ask(mode: str) -> None:
    async with site() as here:
        logs.configure(mode)
        own = await here.embed(["a", "bcd"])
        assert re.fullmatch("[0-9a-f]{32}", own.headers["x-request-id"])
        here.client.headers["x-request-id"] = "from-the-client"
        given = await here.client.get('/no"where?secret=1')
        assert given.headers["x-request-id"] == "from-the-client"
        for wrong in ("", "two words", "x" * 129, "tab\tbed"):
            here.client.headers["x-request-id"] = wrong
            new = (await here.client.get("/health")).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", new)


def test_the_log_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("off", as_json=True)
    log = logging.getLogger("shm_broadcast.state.board")
    where = {"rank": 1, "group": "tp", "generation": 2}
    log.info("%s was aborted: %s", "tp", 'rank 1 said "no"', extra=where)
    logging.getLogger("another").info("not ours")
    try:
        raise ValueError("oh")
    except ValueError:
        logging.getLogger("another").exception("a failure\nin two lines")
    ours, other = map(json.loads, capfd.readouterr().err.splitlines())
    assert re.fullmatch(TIME, ours.pop("time"))
    assert ours == {
        "level": "INFO",
        "logger": "shm_broadcast.state.board",
        "message": 'tp was aborted: rank 1 said "no"',
        **where,
    }
    assert (other["message"], other["level"]) == ("a failure\nin two lines", "ERROR")
    assert other["traceback"].endswith("ValueError: oh")


async def test_each_request_has_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    await ask("on")
    embedded, missing, *_ = capfd.readouterr().out.splitlines()
    assert re.fullmatch(
        rf'{TIME} 127.0.0.1:123 POST "/v1/embeddings" status=200 ms=[\d.]+ bytes=\d+ '
        r"id=[0-9a-f]{32} inputs=2 tokens=4",
        embedded,
    )
    assert "status=404" in missing and "id=from-the-client" in missing
    assert "secret" not in missing
    await ask("json")
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == 6
    assert re.fullmatch(TIME, lines[0]["time"])
    assert (lines[0]["method"], lines[0]["status"], lines[0]["tokens"]) == ("POST", 200, 4)
    assert lines[1]["path"] == "/no%22where"
    await ask("off")
    assert capfd.readouterr() == ("", "")


async def test_a_long_path_is_cut_in_answer_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with site() as here:
        logs.configure("json")
        for path in ("/" + "x" * 60_000, "/v1/models/" + "x" * 60_000):
            answer = await here.client.get(path)
            assert answer.status_code == 404
            message = answer.json()["error"]["message"]
            assert re.search(r"x{3000} \.\.\. and 56\d{3} characters more$", message)
    lines = map(json.loads, capfd.readouterr().out.splitlines())
    assert [3000 < len(line["path"]) < 5000 for line in lines] == [True, True]


@pytest.mark.parametrize("n_warnings", [1, 3])
def test_an_access_log_that_cannot_be_written_warns_without_a_traceback(
    n_warnings: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, broken = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(full, "w") as full_disk, os.fdopen(broken, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread if n_warnings == 1 else full_disk)
        logs.configure("on")
        for _ in range(3):
            logging.getLogger(logs.ACCESS).info("request", extra=FACTS)
        warnings = capfd.readouterr().err.splitlines()
        assert len(warnings) == n_warnings
        assert "the access log cannot be written: " in warnings[0]
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), full)  # what is left can be written


@pytest.fixture
def unread() -> Iterator[tuple[int, TextIO]]:
    """Both ends of a pipe; a write that blocks raises after 30 s."""
    reader, writer = os.pipe()
    signal.signal(signal.SIGALRM, lambda *_: os.close(reader))
    signal.alarm(30)
    with os.fdopen(writer, "w") as pipe:
        yield reader, pipe
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.close(reader)


@pytest.mark.parametrize("shared", [False, True])
def test_a_log_waits_for_no_reader_that_stops(
    shared: bool,
    unread: tuple[int, TextIO],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also where both logs go to one pipe, as by ``2>&1``."""
    reader, pipe = unread
    monkeypatch.setattr(sys, "stdout", pipe)
    if shared:
        monkeypatch.setattr(sys, "stderr", pipe)
    logs.configure("on")
    n_lines = 3000
    for _ in range(n_lines):
        logging.getLogger(logs.ACCESS).info("request", extra=FACTS)
    logging.getLogger("another").warning("this")
    logging.getLogger("another").warning("that")
    n_written = os.read(reader, 1 << 20).count(b"\n")
    assert 0 < n_written < n_lines
    logging.getLogger(logs.ACCESS).info("request", extra=FACTS)
    logging.getLogger("another").warning("the rest")
    later = os.read(reader, 1 << 20).decode() + capfd.readouterr().err
    assert later.count('GET "/"') == 2  # the one that was waited for is kept
    assert f"the access log was not read: {n_lines - n_written - 1} lines were dropped" in later
    assert "WARNING another: this" in later
    assert ("WARNING another: that" in later) != shared
    assert "WARNING another: the rest" in later
    assert ("the log was not read: 1 lines were dropped" in later) == shared


def test_a_line_longer_than_the_pipe_is_completed_later(
    unread: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, pipe = unread
    monkeypatch.setattr(sys, "stderr", pipe)
    logs.configure("off")
    log, long = logging.getLogger("another"), "x" * 10_000
    for _ in range(9):
        log.warning(long)
    before = os.read(reader, 1 << 20)
    assert not before.endswith(b"\n")
    log.warning("and then")
    *whole, last, told = (before + os.read(reader, 1 << 20)).decode().splitlines()
    assert 0 < len(whole) < 9
    assert all(line.endswith(f"WARNING another: {long}") for line in whole)
    assert last.endswith("WARNING another: and then")
    assert told.endswith(f"the log was not read: {9 - len(whole)} lines were dropped")


def test_a_flood_of_one_kind_is_cut_and_hides_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs.configure("off")
    for number in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid request %d", number)
    logging.getLogger("server.service.pool_service").error("the cause")
    *flood, last = capfd.readouterr().err.splitlines()
    assert len(flood) == 10
    assert re.fullmatch(rf"{TIME} WARNING uvicorn.error: Invalid request 0", flood[0])
    assert flood[-1].endswith("(more of these are dropped for 60 s)")
    assert last.endswith("ERROR server.service.pool_service: the cause")


def test_a_flood_may_go_on_after_its_minute() -> None:
    sparing = logs.RateLimitFilter(limit=2, seconds=60.0)

    def passes(at: float) -> bool:
        record = logging.makeLogRecord({"name": "x", "msg": f"at {at}", "lineno": 7})
        record.created = at
        return sparing.filter(record)

    assert [passes(at) for at in (0.0, 1.0, 2.0, 59.0, 60.0, 61.0, 62.0)] == [
        True, True, False, False, True, True, False,
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_all_ranks_in_one_bar_and_a_pipe_nothing() -> None:
    out = Terminal()
    bar = ProgressBar(out)
    bar.begin()
    bar(0, 10, 40, "weights")
    bar(1, 0, 40, "weights")
    bar(0, 40, 40, "weights")
    bar(1, 40, 40, "weights")
    bar.end("ready")
    assert out.getvalue().split("\r\x1b[K") == [
        "",
        "starting the workers",
        "[" + "#" * 7 + "." * 23 + "]  25 % loaded: weights",
        "[" + "#" * 3 + "." * 27 + "]  12 % loaded: weights",
        "[" + "#" * 15 + "." * 15 + "]  50 % loaded: weights",
        "warming up",
        "ready\n",
    ]
    pipe = io.StringIO()
    bar = ProgressBar(pipe)
    bar(0, 1, 2, "weights")
    bar.end("ready")
    assert pipe.getvalue() == ""
