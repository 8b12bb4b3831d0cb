"""The service's log on stderr, which limits repeated lines, and its access log.

The access log, if switched on, is written to stdout, a line for each request.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from shm_broadcast import Deadline
from shm_broadcast.deadline import milliseconds

PACKAGE = __name__.partition(".")[0]
ACCESS = f"{PACKAGE}.access"
"""The logger of requests; what is known of one stands in its record's ``facts``."""
LOWER_FLOORS = ("coordinator", "device_comm", "shm_broadcast")
FIELDS = ("rank", "group", "generation", "host")
"""What records of our packages tell beside their text, where it is known."""
ACCESS_MODES = ("off", "on", "json")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log = logging.getLogger(__name__)
_KIND_LIMIT = 10
_KIND_SECONDS = 60.0
_READER_SECONDS = 0.5


def utc(seconds: float) -> str:
    """A time since the epoch as text, to the millisecond."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


class UtcFormatter(logging.Formatter):
    """Lines with the time in UTC, to the millisecond."""

    def formatTime(self, record: logging.LogRecord, _: str | None = None) -> str:  # noqa: N802
        """The record's time."""
        return utc(record.created)


class RateLimitFilter(logging.Filter):
    """Lets through some records of a kind in each minute, and counts the others.

    A kind is a logger and the line that logs: what differs between two records is their arguments.
    So a client that can provoke a line cannot fill the disk with it.
    """

    def __init__(self, limit: int = _KIND_LIMIT, seconds: float = _KIND_SECONDS) -> None:
        super().__init__()
        self._limit = limit
        self._seconds = seconds
        self._since: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write ``record``; the last one before others are left out says so."""
        kind = (record.name, record.pathname, record.lineno)
        since, count = self._since.get(kind, (record.created, 0))
        if record.created - since >= self._seconds:
            since, count = record.created, 0
        self._since[kind] = (since, count + 1)
        if count == self._limit - 1:
            record.msg = f"{record.msg} (more of these are left out for {self._seconds:.0f} s)"
        return count < self._limit


class _AccessAsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"time": utc(record.created), **_facts(record)})


class _AccessAsText(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        shown = dict(_facts(record))
        client, method, path = (shown.pop(name) for name in ("client", "method", "path"))
        told = " ".join(f"{name}={value}" for name, value in shown.items())
        return f"{utc(record.created)} {client} {method} {json.dumps(path)} {told}"


class _LogAsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := record.__dict__.get(name)) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _UnblockedHandler(logging.StreamHandler[TextIO]):
    """Leaves lines out while who should read them does not; the service goes on.

    A pipe that is full is waited for once, and the rest of that line is kept. When there is room
    again it comes first, and what was left out is counted. Where two handlers write to one pipe, a
    line of more than `select.PIPE_BUF` bytes may be split by the other's.

    Args:
        stream: has a file descriptor; nobody else may leave text in its buffer.
        told_as: what the lines are called.
    """

    def __init__(self, stream: TextIO, told_as: str) -> None:
        super().__init__(stream)
        self._told_as = told_as
        self._rest = b""
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or leave it out."""
        try:
            self._write_rest(0.0)
            if self._rest:
                self._left_out += 1
                return
            line = f"{self.format(record)}{self.terminator}"
            self._rest = line.encode(self.stream.encoding, self.stream.errors or "strict")
            self.flush()
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)
        left_out, self._left_out = self._left_out, 0
        if left_out:
            _log.warning("%s was not read: %d lines are left out", self._told_as, left_out)

    def flush(self) -> None:
        """Write what is left of the last line, if its reader reads."""
        self._write_rest(_READER_SECONDS)

    def _write_rest(self, seconds: float) -> None:
        if not self._rest:
            return
        room = select.poll()
        room.register(self.stream, select.POLLOUT)
        deadline = Deadline.after(seconds)
        try:
            while self._rest and room.poll(milliseconds(deadline.remaining())):
                # A pipe that has room takes so much without waiting.
                piece = self._rest[: select.PIPE_BUF]
                self._rest = self._rest[os.write(self.stream.fileno(), piece) :]
        except OSError:
            self._rest = b""
            raise


class _AccessHandler(_UnblockedHandler):
    """Writes lines until its reader has gone; then it says so, once, and writes nowhere."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(error := sys.exception(), OSError):
            super().handleError(record)
            return
        _log.warning("the access log cannot be written: %s", error)
        if isinstance(error, BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # also what is left to be written at the end
            os.close(nowhere)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = record.__dict__["facts"]
    return facts


def configure(access: str, *, as_json: bool = False) -> None:
    """Write records to stderr, from warnings up; a service that is well says nothing.

    Args:
        access: how to write requests to stdout, one of `ACCESS_MODES`.
        as_json: as an object a line, with what is known of `FIELDS`; those of our packages also at
            level INFO.
    """
    handler: logging.Handler = _UnblockedHandler(sys.stderr, "the log")
    handler.setFormatter(_LogAsJson() if as_json else UtcFormatter(FORMAT))
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in (PACKAGE, *LOWER_FLOORS):
        logging.getLogger(package).setLevel(logging.INFO if as_json else logging.WARNING)
    requests = logging.getLogger(ACCESS)
    requests.setLevel(logging.INFO)
    requests.propagate = False
    requests.disabled = access == "off"
    handler = _AccessHandler(sys.stdout, "the access log")
    handler.setFormatter(_AccessAsJson() if access == "json" else _AccessAsText())
    requests.handlers = [handler]
