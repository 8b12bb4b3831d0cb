"""A host's name that leads nowhere."""

from __future__ import annotations

import socket

import pytest

from coordinator.launcher import resolve


def test_the_error_names_a_host_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(socket.gaierror) as caught:
        resolve("nowhere", 80, socket.SOCK_STREAM)
    assert caught.value.errno == socket.EAI_NONAME
    assert caught.value.strerror == "nowhere cannot be resolved: Name or service not known"
