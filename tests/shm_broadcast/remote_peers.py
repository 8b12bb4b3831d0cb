"""What the tests of remote queues share: a secret, a mailbox between processes, and waits."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from shm_broadcast.errors import GroupClosedError
from shm_broadcast.net.reader import RemoteReader
from shm_broadcast.net.writer import RemoteWriter
from tests.patience import NAMED_WITHIN, until

if TYPE_CHECKING:
    from collections.abc import Iterable

SECRET = b"a launcher's secret, 32 bytes ok"
LIMIT = 20.0
"""Seconds that anything in these tests may take at most."""

SILENCE = 4.0
"""Seconds of silence after which a peer counts as lost: no stall of the machine is as long."""

STALL = 2.0
"""Seconds that the machine may stall at most."""

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
    until(path.exists, f"{name} was not left in {folder}")
    return pickle.loads(path.read_bytes())


def assert_after_silence(seconds: float) -> None:
    """A peer that fell silent was named when its silence was over.

    zmq gives up after three quarters of it, and may have begun to count before, in a stall.
    """
    assert 0.75 * SILENCE - STALL < seconds < SILENCE + NAMED_WITHIN + STALL


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


def read_all(reader: RemoteReader, folder: str, count: int) -> list[list[bytes]]:
    """``count`` messages, after which the writer, which `await_readers`, closes."""
    received = [[bytes(part) for part in reader.recv(LIMIT)] for _ in range(count)]
    put(folder, f"read {reader.rank}", True)
    with pytest.raises(GroupClosedError):
        reader.recv(LIMIT)
    return received


def await_readers(folder: str, ranks: Iterable[int]) -> None:
    """Wait for each that is in `read_all`: what is unread may be lost when the writer closes."""
    for rank in ranks:
        get(folder, f"read {rank}")
