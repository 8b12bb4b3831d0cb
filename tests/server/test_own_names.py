"""By which names a service without a key may be called."""

from __future__ import annotations

import socket

import httpx
import pytest

from server.service.app import names_of
from tests.server.fake_service import app_of, site

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("called", "status"),
    [
        *((name, 200) for name in ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000")),
        *((name, 200) for name in ("[::1]", "[::1]:8000", "127.8.9.10:80", socket.gethostname())),
        *((name, 400) for name in ("site.example", "site.example:8000", "localhost.site.example")),
        *((name, 400) for name in ("127.0.0.1.site.example", "[::1", "[site.example]", ":8000")),
        *((name, 400) for name in ("localhost@site.example", "\u2100", "/localhost")),
    ],
)
async def test_by_its_own_names_alone(called: str, status: int) -> None:
    async with site() as here:
        transport = httpx.ASGITransport(app_of(here.service).app(names_of("127.8.9.10")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/", "/status", "/metrics", "/health"):
                answer = await client.get(path, headers={"host": called.encode()})
                assert answer.status_code == status
                assert answer.headers["x-request-id"]


def test_an_ipv6_address_is_a_name() -> None:
    assert "[::1]" in names_of("::1") and "[fe80::1]" in names_of("fe80::1")
