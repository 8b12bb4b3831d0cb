"""Another user of this host, who writes to each listening socket while something starts.

Let both be in a network of their own (`tests.netns.isolate`). To become that user takes root.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from shm_broadcast import Board
from tests.sockets import reachable_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
_LISTENING = "0A"
_PATIENCE = timedelta(seconds=1)


@dataclass
class Report:
    """What the intruder came to."""

    touched: list[str] = field(default_factory=list)
    """Keys and sockets that he could read or write; processes whose descriptors he could see."""
    looks: int = 0


@contextmanager
def intruder() -> Iterator[Report]:
    """Attack as user nobody until the end of the block, then fill in the report."""
    report = Report()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.close(reading)
            _attack(os.getppid(), writing)
        os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            assert lines.readline() == "ready\n"
            yield report
            os.kill(pid, signal.SIGTERM)
            found = json.loads(lines.readline())
        report.touched, report.looks = found
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _attack(parent: int, writing: int) -> None:
    become_nobody()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # torch complains there
    touched: set[str] = set()
    looks = 0
    board = Board.create(8, 0, "an intruder's")
    trap = socket.create_server(("127.0.0.1", 0))
    lies = [
        msgspec.msgpack.encode(board.handle()),
        msgspec.msgpack.encode(board.handle().segment),
        os.urandom(16),
        b"127.0.0.1:%d" % trap.getsockname()[1],
        b"1",
        b"",
    ]
    os.write(writing, b"ready\n")
    while not stopping:
        looks += 1
        for address, port in _listeners() - {trap.getsockname()}:
            touched.add(f"{address}:{port}")
            _write_to(address, port, lies, looks, touched)
        for pid in _children(parent):
            with suppress(OSError):
                if reachable_sockets(pid):
                    touched.add(f"descriptors of {pid}")
    os.write(writing, json.dumps([sorted(touched), looks]).encode() + b"\n")
    os._exit(0)


def _write_to(address: str, port: int, lies: list[bytes], turn: int, touched: set[str]) -> None:
    with suppress(Exception):
        store = dist.TCPStore(address, port, None, False, _PATIENCE, wait_for_workers=False)
        for number, key in enumerate(store.list_keys()):
            touched.add(key)
            if "rounds" in key or "count" in key:
                store.add(key.removeprefix("/"), 1)
            else:
                store.set(key.removeprefix("/"), lies[(number + turn) % len(lies)])


def _listeners() -> set[tuple[str, int]]:
    found = set()
    for table, length in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, port = fields[1].split(":")
                loopback = "127.0.0.1" if length == 8 else "::1"
                any_address = set(address) == {"0"}
                found.add((loopback if any_address else _dotted(address, loopback), int(port, 16)))
    return found


def _dotted(address: str, otherwise: str) -> str:
    if len(address) != 8:
        return otherwise
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))


def _children(parent: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text()
                if int(stat[stat.rindex(")") + 2 :].split()[1]) == parent:
                    found.add(int(entry.name))
    return found - {os.getpid()}


def become_nobody() -> None:
    """Go on as user nobody, for good. Takes root."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
