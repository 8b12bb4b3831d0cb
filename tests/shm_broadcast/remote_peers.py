"""What the tests of remote queues share: a secret, a mailbox between processes, and waits."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shm_broadcast.errors import GroupClosedError
from shm_broadcast.remote_reader import RemoteReader
from shm_broadcast.remote_writer import RemoteWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SECRET = b"a launcher's secret, 32 bytes ok"
LIMIT = 20.0
"""Seconds that anything in these tests may take at most."""

BOUND = 1.0
"""Seconds within which a killed peer must be named."""

CREDIT = 1 << 18
"""Bytes that may be under way to a reader."""


def put(folder: str, name: str, value: Any) -> None:
    """Leave a value for other processes under ``name``."""
    unfinished = Path(folder) / f".{name}"
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(Path(folder) / name)


def get(folder: str, name: str) -> Any:
    """Wait for the value that another process leaves under ``name``."""
    path = Path(folder) / name
    wait_until(path.exists, f"{name} was not left in {folder}")
    return pickle.loads(path.read_bytes())


def wait_until(ready: Callable[[], bool], otherwise: str = "it did not happen") -> None:
    """Wait for ``ready()``, at most `LIMIT` seconds."""
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


def make_writer(
    folder: str, readers: Iterable[int], host: str = "127.0.0.1", **options: Any
) -> RemoteWriter:
    """A writer of rank 0 whose handle is published."""
    writer = RemoteWriter(0, readers, host, SECRET, **options)
    put(folder, "handle", writer.handle)
    return writer


def make_reader(folder: str, rank: int) -> RemoteReader:
    """A reader of the published handle, welcomed by its writer."""
    reader = RemoteReader(get(folder, "handle"), rank, SECRET)
    reader.wait_ready(LIMIT)
    return reader


def fill(writer: RemoteWriter, size: int = 20_000, timeout: float = LIMIT) -> NoReturn:
    """Send until something raises."""
    while True:
        writer.send([bytes(size)], timeout)


def drain(reader: RemoteReader) -> NoReturn:
    """Read until something raises."""
    while True:
        reader.recv(LIMIT)


def read_all(reader: RemoteReader) -> list[list[bytes]]:
    """All messages until the writer closes."""
    received: list[list[bytes]] = []
    while True:
        try:
            message = reader.recv(LIMIT)
        except GroupClosedError:
            return received
        received.append([bytes(part) for part in message])
