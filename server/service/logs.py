"""Log to stderr with a rate limit, and write an access log to stdout."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from typing import TextIO

from shm_broadcast import Deadline
from shm_broadcast.deadline import milliseconds

PACKAGE = __name__.partition(".")[0]
ACCESS = f"{PACKAGE}.access"
"""Logger of requests; ``facts`` of a record has the fields of one request."""
LOWER_FLOORS = ("coordinator", "device_comm", "shm_broadcast")
FIELDS = ("rank", "group", "generation", "host")
"""Attributes that records of our packages may have."""
ACCESS_MODES = ("off", "on", "json")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log = logging.getLogger(__name__)
_KIND_LIMIT = 10
_KIND_SECONDS = 60.0
_READER_SECONDS = 0.5


class _UtcFormatter(logging.Formatter):
    """Formats records with the time in UTC, in milliseconds."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class RateLimitFilter(logging.Filter):
    """Passes a limited number of records per minute and line of code.

    A client that can trigger a log line cannot fill the disk with it.
    """

    def __init__(self, limit: int = _KIND_LIMIT, seconds: float = _KIND_SECONDS) -> None:
        super().__init__()
        self._limit = limit
        self._seconds = seconds
        self._since: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write ``record``; the last one before a gap announces it."""
        kind = (record.name, record.pathname, record.lineno)
        since, count = self._since.get(kind, (record.created, 0))
        if record.created - since >= self._seconds:
            since, count = record.created, 0
        self._since[kind] = (since, count + 1)
        if count == self._limit - 1:
            record.msg = f"{record.msg} (more of these are dropped for {self._seconds:.0f} s)"
        return count < self._limit


class _AccessFormatter(_UtcFormatter):
    def format(self, record: logging.LogRecord) -> str:
        shown = dict(record.__dict__["facts"])
        client, method, path = (shown.pop(name) for name in ("client", "method", "path"))
        fields = " ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.formatTime(record)} {client} {method} {json.dumps(path)} {fields}"


class _JsonFormatter(_UtcFormatter):
    def format(self, record: logging.LogRecord) -> str:
        given = record.__dict__
        facts = given.get("facts") or {
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: given[name] for name in FIELDS if given.get(name) is not None},
        }
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps({"time": self.formatTime(record), **facts})


class _UnblockedHandler(logging.StreamHandler[TextIO]):
    """Drops log lines instead of blocking when the pipe is full.

    A full pipe is polled once, for `_READER_SECONDS`; the rest of that line is kept and written
    first later. Lines of more than `select.PIPE_BUF` bytes may interleave with another handler's on
    the same pipe. Nothing else may fill the buffer of ``stream``.
    """

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._rest = b""
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write_rest(0.0)
            if self._rest:
                self._n_dropped += 1
                return
            line = f"{self.format(record)}{self.terminator}"
            self._rest = line.encode(self.stream.encoding, self.stream.errors or "strict")
            self.flush()
        except Exception:  # noqa: BLE001 - as in logging's own handlers
            self.handleError(record)
        n_dropped, self._n_dropped = self._n_dropped, 0
        if n_dropped:
            _log.warning("%s was not read: %d lines were dropped", self._title, n_dropped)

    def flush(self) -> None:
        self._write_rest(_READER_SECONDS)

    def _write_rest(self, seconds: float) -> None:
        if not self._rest:
            return
        room = select.poll()
        room.register(self.stream, select.POLLOUT)
        deadline = Deadline.after(seconds)
        try:
            while self._rest and room.poll(milliseconds(deadline.remaining())):
                # POLLOUT promises room for PIPE_BUF bytes.
                piece = self._rest[: select.PIPE_BUF]
                self._rest = self._rest[os.write(self.stream.fileno(), piece) :]
        except OSError:
            self._rest = b""
            raise


class _AccessHandler(_UnblockedHandler):
    """Writes lines until the reader closes the pipe; then logs that once, and writes nothing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(error := sys.exception(), OSError):
            super().handleError(record)
            return
        _log.warning("the access log cannot be written: %s", error)
        logging.getLogger(ACCESS).disabled = isinstance(error, BrokenPipeError)


def configure(access: str, *, as_json: bool = False) -> None:
    """Log to stderr from WARNING, and write the access log; ``as_json``: JSON lines, from INFO."""
    handler: logging.Handler = _UnblockedHandler(sys.stderr, "the log")
    handler.setFormatter(_JsonFormatter() if as_json else _UtcFormatter(FORMAT))
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in (PACKAGE, *LOWER_FLOORS):
        logging.getLogger(package).setLevel(logging.INFO if as_json else logging.WARNING)
    requests = logging.getLogger(ACCESS)
    requests.setLevel(logging.INFO)
    requests.propagate = False
    requests.disabled = access == "off"
    handler = _AccessHandler(sys.stdout, "the access log")
    handler.setFormatter(_JsonFormatter() if access == "json" else _AccessFormatter())
    requests.handlers = [handler]
