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
    options = ("--request-timeout", "120", "--max-num-batched-tokens", "1024")
    with ForkedServed(*options) as served:
        served.wait_until_ready()
        yield served


def connect(served: Served) -> socket.socket:
    at = urlsplit(served.url)
    return socket.create_connection((at.hostname, at.port), 60)


def ask(served: Served, input: Any, key: str = "", **fields: Any) -> httpx.Response:  # noqa: A002
    body, url = {"model": PACKAGED_NAME, "input": input, **fields}, f"{served.url}/v1/embeddings"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url, json=body, headers=headers, timeout=120, verify=False)


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


def many_texts(n: int) -> tuple[dict[str, Any], int]:
    return {"input": ["a" * 4000] * n, "truncate": True}, 200


def hostile_requests() -> list[tuple[dict[str, Any], int]]:
    """Requests as large as may be, and their answers' status."""
    half = "wörd " * (NEARLY // 12)
    return [
        ({"input": "word " * (NEARLY // 5)}, 400),
        ({"input": "word " * (NEARLY // 5), "truncate": True}, 200),
        ({"input": "x" * NEARLY, "truncate": True}, 200),
        ({"input": " " * NEARLY, "truncate": True}, 200),
        ({"input": "\u0301" * (NEARLY // 6), "truncate": True}, 200),
        ({"input": [half, half], "truncate": True}, 200),
        many_texts(512),
        ({"input": [7] * (NEARLY // 3)}, 400),
        ({"input": [7] * (NEARLY // 3), "truncate": True}, 400),
        ({"input": [7] * (MAX_VALUES - 9), "truncate": True}, 200),
        ({"input": [[7] * 900] * 2048}, 400),
        ({"input": "x" * MAX_BODY_BYTES}, 413),
    ]


def test_a_small_request_does_not_wait_for_a_large_one(service: Served) -> None:
    answers: list[httpx.Response] = []
    large = threading.Thread(target=lambda: answers.append(ask(service, ["word " * 240] * 32)))
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


def limit_memory(pids: Sequence[int], room: int | None) -> None:
    """Let processes map so many bytes more than they have; None: as many as they want."""
    for pid in pids:
        most = -1 if room is None else psutil.Process(pid).memory_info().vms + room
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, hard))


def test_hostile_texts_cost_bounded_memory_and_kill_no_worker(service: Served) -> None:
    pids = service.worker_pids()
    every = (service.process.pid, *pids)
    assert ask(service, ["warm " * 250] * 16).status_code == 200
    with Peak(every) as peak:
        limit_memory(every, 512 * MIB)
        for fields, status in hostile_requests():
            answer = ask(service, **fields)
            assert answer.status_code == status, (answer.text[:200], peak.grown() / MIB)
        limit_memory(every, None)
        fields, status = many_texts(2048)
        assert ask(service, **fields).status_code == status
    assert peak.grown() < 512 * MIB, peak.grown() / MIB
    assert peak.kept() < 256 * MIB, peak.kept() / MIB
    assert service.worker_pids() == pids
    assert ask(service, "after").status_code == 200


def test_a_service_on_ipv6_requires_its_key_and_waits_for_a_half_sent_request() -> None:
    with ForkedServed("--drain-timeout", "1", "--api-key", "secret", host="::1") as served:
        assert served.url.startswith("http://[::1]:")
        served.wait_until_ready()
        refused = ask(served, "a")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert ask(served, "a", key="secret").status_code == 200
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
        with connect(served) as half, connect(served) as silent, connect(served) as begun:
            half.sendall(head + b"authorization: Bearer secret\r\n\r\n{")
            begun.sendall(b"GET /hea")
            assert served.get("/health")[0] == 200  # those before it have been seen
            began = time.monotonic()
            served.process.send_signal(signal.SIGHUP)
            assert silent.recv(1) == begun.recv(1) == b""
            status, errors = served.finish()
            assert (status, errors.count("\n")) == (1, 1)
            assert "accepted requests are abandoned" in errors
            assert time.monotonic() - began < 10.0 + STALL_SECONDS
