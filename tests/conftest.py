"""Fixtures that every package's tests share."""

from __future__ import annotations

import gc
import importlib.util
import signal
import sys
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu_environment import keep_out_of_mps, run_side_by_side
from tests.netns import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    """A file that does not exist yet, for `tests.ranks.init_gloo`."""
    return str(tmp_path / "store")


def pytest_configure(config: pytest.Config) -> None:
    """Have signals do what they do, also where a shell or nohup started the tests aside."""
    if importlib.util.find_spec("hypothesis") is not None:
        config.pluginmanager.import_plugin("tests.unhurried")
    run_side_by_side()
    keep_out_of_mps()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Others spin for the cores that the processes under test need: ten times as slow on two.
    torch.set_num_threads(1)
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, import no file without such tests: it may want what is not installed."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "pytest.mark.gpu" not in collection_path.read_text() else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect no garbage before, and later none among what was imported: it stays."""
    gc.freeze()
    gc.enable()
    if "tests.ranks" in sys.modules:  # later its environment could be that of a test
        forkserver.ensure_running()
    if any("server" in item.path.parts for item in session.items):
        from tests.warm_forks import start_nest

        start_nest()


@pytest.fixture(scope="module", autouse=True)
def _what_other_modules_imported_is_no_garbage() -> None:
    """Free collections of garbage in the tests from a look at all that was imported before."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The slowest first, and what is left at the end is short: cores do not wait for the last file.
    items.sort(key=lambda item: "server" not in item.path.parts)
    _skip(items, "gpu", _no_gpu)
    _skip(items, "namespaces", unavailable)


def _skip(items: list[pytest.Item], marker: str, reason: Callable[[], str | None]) -> None:
    """Skip those that have this marker if there is a reason, for which others are not asked."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    why = reason() if marked else None
    if why is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return None
