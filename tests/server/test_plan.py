"""Arguments of a pool, checked before anything starts; naming classes for other processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from server.control.reference import load, main_of, name_of
from server.hosts.place import Hosts
from server.pool import WorkerPool
from server.pool_config import PoolConfig
from tests.server.workers import Worker

if TYPE_CHECKING:
    from pathlib import Path

HEAD = Hosts(2, 0, "127.0.0.1", secret=b"known to both hosts")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tp": 0}, ValueError, "tp must be 1 or more; got 0"),
        ({"pp": -1}, ValueError, "pp must be 1 or more; got -1"),
        (
            {"launcher": "ssh"},
            ValueError,
            "local, hosts, torchrun, ray; got 'ssh'",
        ),
        ({"start_timeout": 0}, ValueError, "start_timeout must be more than 0 seconds"),
        ({"worker": "no_colon"}, ValueError, "worker must be 'package.module:Class'"),
        ({"worker": len}, TypeError, "worker must be a class"),
        ({"worker_kwargs": {"f": lambda: 0}}, TypeError, r"worker_kwargs\['f'\] cannot be pickled"),
        (
            {"worker_kwargs": {"table": bytes(17 << 20)}, "launcher": "hosts", "hosts": HEAD},
            ValueError,
            r"worker_kwargs may have 16777216 bytes over hosts, pickled; got 178\d+: give workers",
        ),
        ({"device": "abacus"}, ValueError, "device: .*abacus"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        WorkerPool(arguments.pop("worker", Worker), **arguments)


@pytest.mark.parametrize(
    "wrong", [{"in_flight": 0}, {"kill_seconds": -1.0}, {"threads": 0}, {"threads": 10**8}]
)
def test_wrong_settings_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PoolConfig(**wrong)


def test_a_class_is_named_by_module_and_name() -> None:
    assert name_of(Worker) == "tests.server.workers:Worker"
    assert name_of("a.b:C.D") == "a.b:C.D"
    assert load("tests.server.workers:Worker", None) is Worker
    assert main_of("tests.server.workers:Worker") is None


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(ValueError, match="defined in a function"):
        name_of(Local)


def test_a_class_of_a_session_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    typed = type("Typed", (), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Typed is defined where no other process"):
        name_of(typed)
    script = tmp_path / "run.py"
    script.touch()
    session.__file__ = str(script)
    assert name_of(typed) == "__main__:Typed"
    assert main_of("__main__:Typed") == {"init_main_from_path": str(script)}


@pytest.mark.parametrize("name", ["tests.server.workers:Nobody", "tests.server.workers:sys"])
def test_loading_what_is_no_class_says_so(name: str) -> None:
    with pytest.raises((AttributeError, TypeError), match=r"Nobody|is not a class"):
        load(name, None)
