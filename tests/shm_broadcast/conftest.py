"""Fixtures of the shm_broadcast tests."""

from __future__ import annotations

import pytest

from shm_broadcast import atomics
from shm_broadcast.ring import reader as ring_reader
from shm_broadcast.ring import writer as ring_writer


@pytest.fixture(params=["native", "twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test over the C extension, and over its Python twin."""
    name: str = request.param
    if name == "twin":
        for module in (atomics, ring_reader, ring_writer):
            monkeypatch.setattr(module, "native", None)
    return name
