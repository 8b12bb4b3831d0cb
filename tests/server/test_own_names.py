"""By which names a service without a key may be called."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.middleware import Middleware

from server.service.face import OPEN, TrustedHosts, is_own, names_of
from tests.server.fake_service import face, site
from tests.server.test_metrics import labelled, samples


@pytest.mark.parametrize(
    "called",
    [
        *("localhost", "LocalHost:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000"),
        *("[::1]", "[::1]:8000", "10.1.2.3:80", "service.here:80", socket.gethostname()),
    ],
)
def test_addresses_and_names_of_its_own_are(called: str) -> None:
    assert is_own(called, names_of("Service.here"))


@pytest.mark.parametrize(
    "called",
    [
        *("site.example", "site.example:8000", "localhost.site.example", "127.0.0.1.site.example"),
        *("[::1", "[site.example]", ":8000", "localhost@site.example", "\u2100", "/localhost"),
    ],
)
def test_other_names_are_not(called: str) -> None:
    assert not is_own(called, names_of("127.0.0.1"))


async def test_by_another_name_probes_alone_are_answered() -> None:
    async with site() as here:
        names, failed = names_of("127.0.0.1"), here.service.metrics.fail
        app = face(here.service).app(Middleware(TrustedHosts, names=names, failed=failed))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/", "/status", "/metrics", "/nowhere"):
                own = await client.get(path)
                assert own.status_code == (404 if path == "/nowhere" else 200)
                other = await client.get(path, headers={"host": "site.example:8000"})
                assert other.status_code == 421
                assert "'site.example:8000'" in other.json()["error"]["message"]
                assert other.headers["x-request-id"]
            for path in OPEN:
                probe = await client.get(path, headers={"host": "site.example"})
                assert probe.status_code == 200
        found = samples(here.service.metrics.expose().decode())
        assert labelled(found, "service_requests_total") == {"421": 4}
        assert labelled(found, "service_errors_total") == {"unknown_host": 4}
