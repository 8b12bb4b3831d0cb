"""Arguments of a pool, checked before anything starts; naming classes for other processes."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from server.config import PoolConfig
from server.control.reference import main_of, worker_class, worker_name
from server.driver import pool_plan
from server.hosts.place import Hosts
from server.pool import WorkerPool
from server.replicas import Replicas
from tests.server.workers import Worker

if TYPE_CHECKING:
    from pathlib import Path

HEAD = Hosts(2, 0, "127.0.0.1", secret=b"known to both hosts")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tp": 0}, ValueError, "tp must be 1 or more; got 0"),
        ({"tp": 2048, "dp": 3}, ValueError, "pcp=1 x tp=2048 are 6144 workers; a pool has"),
        ({"tp": 2, "dcp": 3}, ValueError, "dcp=3 does not divide tp=2 x pcp=1"),
        ({"dcp": True}, TypeError, "dcp must be a whole number; got True"),
        ({"axes": {"tp": 2}}, ValueError, r"axes named \['tp'\]: built-in groups"),
        ({"axes": {"cfg": 1.5}}, TypeError, "cfg must be a whole number; got 1.5"),
        ({"axes": {2: 2}}, TypeError, "the name of an axis must be a text; got 2"),
        ({"axes": ["cfg"]}, TypeError, r"axes must be a mapping of sizes by name; got \['cfg'\]"),
        ({"launcher": "ssh"}, ValueError, "local, hosts, torchrun, ray; got 'ssh'"),
        ({"start_timeout": 0}, ValueError, "start_timeout must be more than 0 seconds"),
        ({"worker": "no_colon"}, ValueError, "worker must be 'package.module:Class'"),
        ({"worker": len}, TypeError, "worker must be a class"),
        ({"worker_kwargs": {"f": lambda: 0}}, TypeError, r"worker_kwargs\['f'\] cannot be pickled"),
        (
            {"worker_kwargs": {"table": bytes(17 << 20)}, "launcher": "hosts", "hosts": HEAD},
            ValueError,
            r"worker_kwargs may have 16777216 bytes over hosts, pickled; got 178\d+: give workers",
        ),
        ({"device": "abacus"}, ValueError, "device must be .cpu., .cuda. or one .* got .abacus."),
        ({"device": ["cpu", 0]}, TypeError, r"device\[1\] must be a text; got 0"),
        ({"tp": "2"}, TypeError, "tp must be a whole number; got '2'"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be a whole number; got 1.5"),
        ({"start_timeout": "5"}, TypeError, "start_timeout must be a number of seconds; got '5'"),
        ({"window": "5"}, TypeError, "window must be a number of seconds; got '5'"),
        ({"max_restarts": 3}, ValueError, "max_restarts is for pools that are restarted; got rest"),
        ({"window": 60.0}, ValueError, "window is for pools that are restarted; got rest"),
        ({"stuck_after": 0}, ValueError, "stuck_after must be more than 0 seconds; got 0"),
        ({"on_progress": 5}, TypeError, "on_progress must be a function; got 5"),
        ({"worker_kwargs": [1]}, TypeError, r"worker_kwargs must be a mapping; got \[1\]"),
        ({"config": {}}, TypeError, "config must be a PoolConfig; got {}"),
        ({"replicas": True, "dp": 0}, ValueError, "dp must be 1 or more; got 0"),
        ({"replicas": True, "dp": True}, TypeError, "dp must be a whole number; got True"),
        ({"replicas": True, "tp": "2"}, TypeError, "tp must be a whole number; got '2'"),
        ({"replicas": True, "axes": 2}, TypeError, "axes must be a mapping of sizes by name"),
        ({"replicas": True, "on_progress": 5}, TypeError, "on_progress must be a function; got 5"),
        ({"replicas": True, "config": {}}, TypeError, "config must be a PoolConfig; got {}"),
        ({"replicas": True, "device": None}, TypeError, "device must be a sequence of texts"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    if arguments.pop("replicas", False):
        with pytest.raises(error, match=text):
            Replicas(Worker, **{"dp": 2, **arguments})
        return
    with pytest.raises(error, match=text):
        WorkerPool(arguments.pop("worker", Worker), **arguments)


def test_an_interrupted_start_gives_back_what_it_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reserved:
        closed = False

        def close(self) -> None:
            self.closed = True

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    summoner: Any = Reserved()
    monkeypatch.setattr(pool_plan, "bound_here", interrupted)
    hosts = dataclasses.replace(HEAD, provisioner=summoner)
    with pytest.raises(KeyboardInterrupt):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=hosts)
    assert summoner.closed


def test_numbers_and_texts_of_numpy_count() -> None:
    config = PoolConfig(threads=np.int64(1), kill_seconds=np.float32(0.5), name=np.str_("one"))
    with WorkerPool(Worker, tp=np.int64(2), config=config) as pool:
        assert pool.call("total", 1.0) == 2.0
        assert pool.call("environment")["threads"] == 1
    given = config.threads, config.kill_seconds, config.name
    assert [*map(type, given)] == [int, float, str]  # other hosts are told


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"preload": "json"}, TypeError, "preload must be a sequence of texts; got 'json'"),
        ({"preload": ["json", 5]}, TypeError, r"preload\[1\] must be a text; got 5"),
        ({"name": 5}, TypeError, "name must be a text; got 5"),
        ({"bind": 0}, TypeError, "bind must be a text; got 0"),
        ({"threads": 1.5}, TypeError, "threads must be a whole number; got 1.5"),
        ({"in_flight": True}, TypeError, "in_flight must be a whole number; got True"),
        ({"call_capacity": "x"}, TypeError, "call_capacity must be a whole number; got 'x'"),
        ({"call_seconds": "5"}, TypeError, "call_seconds must be a number of seconds; got '5'"),
        ({"kill_seconds": None}, TypeError, "kill_seconds must be a number of seconds; got None"),
        ({"zero_copy": "no"}, TypeError, "zero_copy must be True or False; got 'no'"),
        ({"call_capacity": -1}, ValueError, "call_capacity"),
        ({"in_flight": 0}, ValueError, "in_flight"),
        ({"kill_seconds": -1.0}, ValueError, "kill_seconds"),
        *[({"call_seconds": wrong}, ValueError, "call_seconds") for wrong in (0, -1.0, math.nan)],
        *[({"threads": wrong}, ValueError, "threads") for wrong in (0, 10**8)],
        ({"preload": ("json",), "fork": False}, ValueError, "preload"),
        *[({"name": wrong}, ValueError, "name") for wrong in ("a\nb", "\x1b[31m")],
        *[
            ({"bind": wrong}, ValueError, "bind must be none, auto, or .* got")
            for wrong in ("", "all", "0-", "0|", "0 1", "node", "0-1|auto", "numa")
        ],
    ],
)
def test_wrong_settings_are_refused(wrong: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PoolConfig(**wrong)


def test_a_class_is_named_by_module_and_name() -> None:
    assert worker_name(Worker) == "tests.server.workers:Worker"
    assert worker_name("a.b:C.D") == "a.b:C.D"
    assert worker_class("tests.server.workers:Worker", None) is Worker
    assert main_of("tests.server.workers:Worker") is None


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(ValueError, match="defined in a function"):
        worker_name(Local)
    for name in ("tests.server.workers:Nobody", "tests.server.workers:sys"):
        with pytest.raises((AttributeError, TypeError), match=r"Nobody|is not a class"):
            worker_class(name, None)


def test_a_class_of_a_session_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session: Any = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    typed = type("Typed", (), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Typed is defined where no other process"):
        worker_name(typed)
    script = tmp_path / "run.py"
    script.touch()
    session.__file__ = str(script)
    with pytest.raises(ValueError, match="a program that another one runs"):
        worker_name(typed)
    session.Typed = typed
    assert worker_name(typed) == "__main__:Typed"
    assert main_of("__main__:Typed") == {"init_main_from_path": os.fsencode(script)}


@pytest.mark.parametrize("name", ["threading.get_ident", "queue.SimpleQueue", "select.select"])
def test_threads_that_are_coroutines_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(name, type("Green", (), {"__module__": "green"}))
    with pytest.raises(RuntimeError, match="were patched by green: make the pool"):
        WorkerPool(Worker)


@pytest.mark.parametrize(("fork", "executable"), [(True, ""), (False, None)])
def test_an_unknown_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, fork: bool, executable: str | None
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(RuntimeError, match=f"that is {executable!r}$"):
        WorkerPool(Worker, config=PoolConfig(fork=fork))


def test_a_frozen_program_is_not_started_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)
    with pytest.raises(RuntimeError, match="is frozen or embeds Python"):
        WorkerPool(Worker, config=PoolConfig(fork=False))
