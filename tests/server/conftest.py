"""Fixtures that the server's tests share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from server.web import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """What a test configures in this process is undone: whoever serves here sets the log up."""
    root, requests = logging.getLogger(), logging.getLogger(logs.ACCESS)
    before = (list(root.handlers), root.level, requests.propagate, list(requests.handlers))
    packages = [logging.getLogger(name) for name in (logs.PACKAGE, *logs.LOWER_FLOORS)]
    levels = [package.level for package in packages]
    yield
    for package, level in zip(packages, levels, strict=True):
        package.setLevel(level)
    root.handlers, requests.propagate, requests.handlers = before[0], before[2], before[3]
    root.setLevel(before[1])
    requests.disabled = False
