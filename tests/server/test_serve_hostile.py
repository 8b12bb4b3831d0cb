"""The service as it runs, under clients that ask for too much, or hold what others need."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from benchmarks.http_served import Served
from server.config import PACKAGED_NAME
from server.service.api import MAX_VALUES
from server.service.app import MAX_BODY_BYTES
from tests.patience import STALL_SECONDS, until
from tests.server.served import ForkedServed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB = 1 << 20
NEARLY = MAX_BODY_BYTES - 4096
"""Characters that still fit into a body."""


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    """For tests that leave it as it was."""
    with ForkedServed("--request-timeout", "120") as served:
        served.wait_until_ready()
        yield served


def connect(served: Served) -> socket.socket:
    at = urlsplit(served.url)
    return socket.create_connection((at.hostname, at.port), 60)


def ask(served: Served, input: Any, **fields: Any) -> httpx.Response:  # noqa: A002
    body = {"model": PACKAGED_NAME, "input": input, **fields}
    return httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=120)


class Peak:
    """The most memory that each of some processes had in a block, in bytes, beyond the start."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._first = self.resident()
        self.most = self._first

    def resident(self) -> list[int]:
        return [each.memory_info().rss for each in self._processes]

    def grown(self) -> int:
        """Of the process that has grown most, at its peak."""
        return max(most - first for most, first in zip(self.most, self._first, strict=True))

    def kept(self) -> int:
        """Of the process that has grown most, now."""
        now = self.resident()
        return max(last - first for last, first in zip(now, self._first, strict=True))

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = [max(pair) for pair in zip(self.most, self.resident(), strict=True)]

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def hostile_requests(most: int = 2048) -> list[tuple[dict[str, Any], int]]:
    """Valid requests as large as may be, of up to ``most`` texts, and their answers' status."""
    half = "wörd " * (NEARLY // 12)
    return [
        ({"input": "word " * (NEARLY // 5)}, 400),
        ({"input": "word " * (NEARLY // 5), "truncate": True}, 200),
        ({"input": "x" * NEARLY, "truncate": True}, 200),
        ({"input": " " * NEARLY, "truncate": True}, 200),
        ({"input": "\u0301" * (NEARLY // 6), "truncate": True}, 200),
        ({"input": [half, half], "truncate": True}, 200),
        ({"input": ["a" * 4000] * most, "truncate": True}, 200),
        ({"input": [7] * (NEARLY // 3)}, 400),
        ({"input": [7] * (NEARLY // 3), "truncate": True}, 400),
        ({"input": [7] * (MAX_VALUES - 9), "truncate": True}, 200),
        ({"input": [[7] * 900] * 2048}, 400),
        ({"input": "x" * MAX_BODY_BYTES}, 413),
    ]


def test_a_small_request_does_not_wait_for_a_large_one(service: Served) -> None:
    answers: list[httpx.Response] = []
    large = threading.Thread(target=lambda: answers.append(ask(service, ["word " * 240] * 48)))
    large.start()
    until(lambda: service.get("/status")[1]["items_waiting"])
    assert ask(service, "small").status_code == 200
    assert service.get("/status")[1]["items_waiting"] > 0
    large.join(120)
    assert answers[0].status_code == 200


def test_a_burst_of_connections_waits_to_be_accepted(service: Served) -> None:
    with ExitStack() as burst:
        service.process.send_signal(signal.SIGSTOP)
        try:
            clients = [burst.enter_context(connect(service)) for _ in range(600)]
        finally:
            service.process.send_signal(signal.SIGCONT)
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_hostile_texts_cost_bounded_memory_and_kill_no_worker(service: Served) -> None:
    pids = service.worker_pids()
    with Peak([service.process.pid, *pids]) as peak:
        assert ask(service, ["warm " * 250] * 16).status_code == 200
        for fields, status in hostile_requests():
            answer = ask(service, **fields)
            assert answer.status_code == status, (answer.text[:200], peak.grown() / MIB)
    assert peak.grown() < 512 * MIB, peak.grown() / MIB
    assert peak.kept() < 256 * MIB, peak.kept() / MIB
    assert service.worker_pids() == pids
    assert ask(service, "after").status_code == 200


def test_within_a_limit_of_memory_no_worker_dies() -> None:
    """What a process may map is limited to what it has when idle, and half a GiB."""
    with ForkedServed("--request-timeout", "120") as served:
        served.wait_until_ready()
        pids = served.worker_pids()
        assert ask(served, ["warm " * 250] * 16).status_code == 200
        for pid in (served.process.pid, *pids):
            room = psutil.Process(pid).memory_info().vms + 512 * MIB
            resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
        for fields, status in hostile_requests(512):
            answer = ask(served, **fields)
            assert answer.status_code == status, answer.text[:200]
        assert served.worker_pids() == pids
        assert ask(served, "after").status_code == 200


def test_a_half_sent_request_delays_a_stop_by_the_drain_timeout() -> None:
    with ForkedServed("--drain-timeout", "1", host="::1") as served:
        served.wait_until_ready()
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        with connect(served) as half, connect(served) as silent, connect(served) as begun:
            half.sendall(head + b"{")
            begun.sendall(b"GET /hea")
            assert served.get("/health")[0] == 200  # those before it have been seen
            began = time.monotonic()
            served.process.send_signal(signal.SIGHUP)
            assert silent.recv(1) == begun.recv(1) == b""
            status, errors = served.finish()
            assert (status, errors.count("\n")) == (1, 1)
            assert "accepted requests are abandoned" in errors
            assert time.monotonic() - began < 10.0 + STALL_SECONDS
