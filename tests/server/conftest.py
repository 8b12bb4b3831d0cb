"""What the server's tests share: fixtures, and that a test may be a coroutine."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING

import pytest

from server.service import logs
from tests.built_once import built_once
from tests.patience import PATIENCE_SECONDS
from tests.server.workers import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A gate that workers of a test wait at."""
    return Gate(tmp_path)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small decoder with random weights, which no test changes."""
    from tests.server.tiny_llama import make_llama  # not every test has its packages

    def make(folder: Path) -> None:
        make_llama(folder / "model")

    return built_once(tmp_path_factory, "llama", make) / "model"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), PATIENCE_SECONDS))
    return True
