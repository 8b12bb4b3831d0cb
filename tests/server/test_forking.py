"""Forked workers: they have all that spawned ones have, even if their server ends."""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil
import pytest
import torch

from server.config import PoolConfig
from server.errors import WorkerLostError, WorkerStartError
from server.launchers.boot import load_workers_modules
from server.launchers.fork_servers import FORK_SERVERS, working_folder
from server.pool import WorkerPool
from tests.forked import in_a_child
from tests.patience import until
from tests.server.test_pool_ends import DRIVERS, Driver
from tests.server.workers import Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=[True, False], ids=["fork", "spawn"])
def either(request: pytest.FixtureRequest) -> PoolConfig:
    return PoolConfig(fork=request.param)


def servers() -> list[psutil.Process]:
    """The fork servers that run.

    A newborn of theirs, which must not be taken for one, is renamed first and then leads a session.
    """
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) == child.pid and child.name() == "pool-forks":
                found.append(child)
    return found


def ask(method: str, config: PoolConfig | None = None, tp: int = 2) -> list[Any]:
    with WorkerPool(Worker, tp=tp, config=config) as pool:
        answers: list[Any] = pool.collective_rpc(method, timeout=120)
        return answers


@pytest.fixture
def server() -> psutil.Process:
    """The only fork server; it has served pools of two."""
    ask("where")
    if len(servers()) != 1:
        FORK_SERVERS.close()
        ask("where")
    (found,) = servers()
    return found


def test_pools_share_a_server_that_has_nothing_a_fork_would_break(
    server: psutil.Process,
) -> None:
    for _ in range(3):
        places = ask("where")
        assert [psutil.pid_exists(pid) for _, pid in places] == [False, False]
    assert servers() == [server]
    assert server.num_threads() == 1
    kinds = sorted(str(fd.readlink()) for fd in Path(f"/proc/{server.pid}/fd").iterdir())
    assert kinds[:3] == ["/dev/null"] * 3
    assert [kind.partition(":")[0] for kind in kinds[3:]] == ["pipe", "socket"]
    assert os.getsid(server.pid) == server.pid
    with WorkerPool(Worker) as pool:
        keeper = psutil.Process(pool.call("where")[1]).parent()
        assert keeper is not None
        assert keeper.ppid() == os.getpid()
        assert keeper.pid != server.pid


def test_workers_inherit_the_drivers_surroundings_and_run_exit_functions(
    either: PoolConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (before,) = ask("inherited", tp=1)
    assert before["variables"]["PYTEST_CURRENT_TEST"] == os.environ["PYTEST_CURRENT_TEST"]
    assert before["blocked"] == set()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("A_WORD", "said")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o027)
    cores = os.sched_getaffinity(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.sched_setaffinity(0, {min(cores)})
    try:
        with WorkerPool(Worker, config=either) as pool:
            there = pool.call("environment")
            inherited = pool.call("inherited")
            pool.call("say_at_the_end")
    finally:
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        os.umask(mask)
    assert (there["folder"], there["path"]) == (str(tmp_path), sys.path)
    assert there["collects"]
    variables = inherited["variables"]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert (variables["A_WORD"], variables["PYTEST_CURRENT_TEST"]) == ("said", "another")
    assert (inherited["mask"], inherited["cores"]) == (["0027"], {min(cores)})
    assert inherited["blocked"] == {signal.SIGUSR2}
    assert (inherited["read"], inherited["argument"]) == ("", 1)
    said = capfd.readouterr().out.splitlines()
    assert said == ["[rank 0] thread", "[rank 0] exit", "[rank 0] finalizer"]


def test_workers_inherit_a_variable_of_torch_and_none_that_is_gone(
    server: psutil.Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also from where the server's folder has gone meanwhile."""
    set_by_torch = "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    monkeypatch.setenv(*set_by_torch)
    assert set_by_torch in ask("inherited")[0]["variables"].items()
    assert servers() == [server]
    monkeypatch.setattr(sys, "path", [os.path.abspath(entry) for entry in sys.path])  # noqa: PTH100
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert "PYTEST_CURRENT_TEST" not in ask("inherited")[0]["variables"]
    tmp_path.mkdir()


def test_where_the_folder_is_gone_workers_start_in_the_root(
    either: PoolConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FORK_SERVERS.close()
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert ask("environment", either, tp=1)[0]["folder"] == "/"
    assert bool(servers()) is either.fork
    tmp_path.mkdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_folder_that_may_not_be_entered_is_no_workers(tmp_path: Path) -> None:
    def go_where_others_may_not() -> None:
        os.chdir(tmp_path)
        tmp_path.chmod(0)
        assert working_folder() == "."
        os.setuid(54321)
        assert working_folder() == "/"

    in_a_child(go_where_others_may_not)


def test_a_driver_that_ignores_sigchld_does_not_get_exit_statuses(
    either: PoolConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with WorkerPool(Worker, config=either) as pool:
            assert pool.call("status_of", ["sh", "-c", "exit 7"]) == 7
            os.kill(pool.call("where")[1], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as lost:
                pool.call("echo")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert lost.value.end == (
        "its exit status is not known: the driver ignores SIGCHLD, or has waited for any child"
    )
    assert "spawned, not forked" not in caplog.text


def test_what_workers_print_goes_where_the_driver_prints_now(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with WorkerPool(Worker, tp=2) as pool:
        pool.collective_rpc("say", args=("hello",))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_a_forked_worker_ends_without_the_finalizers_of_torch() -> None:
    assert "torch.library" not in ask("finalizers", tp=1)[0]


def test_a_module_that_was_changed_is_loaded_anew(
    server: psutil.Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "worker_that_changes.py"
    for answer in ("first", "another"):
        module.write_text(
            "class Changing:\n"
            "    def __init__(self, context): pass\n"
            f"    def answer(self): return {answer!r}\n"
        )
        importlib.invalidate_caches()
        with WorkerPool("worker_that_changes:Changing", tp=2) as pool:
            assert pool.call("answer") == answer


def test_no_two_workers_draw_the_same_numbers() -> None:
    drawn = [*ask("numbers"), *ask("numbers")]
    for generator in ("random", "numpy", "torch"):
        assert len({numbers[generator] for numbers in drawn}) == 4


def test_a_server_that_is_killed_is_replaced_and_its_workers_go_on(server: psutil.Process) -> None:
    with WorkerPool(Worker, tp=2) as pool:
        server.kill()
        with WorkerPool(Worker, tp=2) as another:
            assert pool.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]
            assert another.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]
            (replacement,) = servers()
            assert replacement != server
            assert not psutil.pid_exists(server.pid)
        pids = pids_of(pool)
    assert not any(map(psutil.pid_exists, pids))


def test_servers_that_are_killed_while_they_serve_stop_no_start(server: psutil.Process) -> None:
    chance = random.Random(18)
    children = {child.pid for child in psutil.Process().children()} - {server.pid}
    stop = threading.Event()

    def kill_servers() -> None:
        while not stop.wait(chance.choice((0.0, 0.01, 0.1, 1.0, 2.0))):
            for each in servers():
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    killing = threading.Thread(target=kill_servers)
    killing.start()
    try:
        for _ in range(2):
            with WorkerPool(Worker, tp=2) as pool:
                assert pool.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]
    finally:
        stop.set()
        killing.join()
    FORK_SERVERS.close()
    assert {child.pid for child in psutil.Process().children()} == children


def test_a_server_that_does_not_answer_fails_the_start_in_time_and_is_replaced(
    server: psutil.Process,
) -> None:
    server.suspend()
    with pytest.raises(WorkerStartError, match=r"not ready after 2 s \(late: 0, 1\)") as raised:
        WorkerPool(Worker, tp=2, start_timeout=2)
    assert raised.value.rank == 0
    assert not psutil.pid_exists(server.pid)
    assert [rank for rank, _ in ask("where")] == [0, 1]


def test_an_interrupt_while_a_server_does_not_answer_leaves_nothing(
    server: psutil.Process,
) -> None:
    before = {child.pid for child in psutil.Process().children()} - {server.pid}
    server.suspend()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        WorkerPool(Worker, tp=2, start_timeout=None)
    assert {child.pid for child in psutil.Process().children()} == before


def test_threads_start_pools_at_the_same_time(server: psutil.Process) -> None:
    def start(n: int) -> list[float]:
        with WorkerPool(Worker, tp=n) as pool:
            answers: list[float] = pool.collective_rpc("total", args=(1.0,), timeout=120)
            return answers

    sizes = [1, 2, 1]
    with ThreadPoolExecutor(len(sizes)) as threads:
        assert list(threads.map(start, sizes)) == [[float(n)] * n for n in sizes]
    assert server.is_running()


def test_few_servers_stay(server: psutil.Process) -> None:
    for module in ("json", "csv"):
        ask("where", PoolConfig(preload=(module,)))
    assert len(servers()) == 2
    assert server not in servers()


@contextmanager
def at_start(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> Iterator[None]:
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield
    FORK_SERVERS.close()


def lack_a_module() -> None:
    sys.modules["coordinator.groups"] = None
    refusal = load_workers_modules("server", [])
    assert refusal.startswith("importing workers' modules failed: ModuleNotFoundError")


def have_used_cuda() -> None:
    patch.object(torch.cuda, "_is_in_bad_fork", lambda: True).start()
    refusal = load_workers_modules("server", [])
    assert refusal == "importing workers' modules has used CUDA: forked processes cannot use it"


@pytest.mark.parametrize("spoil", [lack_a_module, have_used_cuda])
def test_what_forks_would_break_is_refused(spoil: Callable[[], None]) -> None:
    in_a_child(spoil)


def test_workers_are_spawned_where_forks_would_break(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    caplog.set_level(logging.WARNING, "server.launchers.fork_servers")
    with at_start(monkeypatch, tmp_path, code):
        for _ in range(2):
            assert [rank for rank, _ in ask("where", tp=1)] == [0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("workers are spawned, not forked: ")
    assert "has started threads: there are 2" in said


def test_workers_are_spawned_where_fork_servers_end_or_a_preload_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import os, sys\nif 'preload' in ' '.join(sys.orig_argv): os._exit(3)\n"
    with at_start(monkeypatch, tmp_path, code):
        assert [rank for rank, _ in ask("where", tp=1)] == [0]
    assert [record.getMessage() for record in caplog.records] == [
        "a worker is spawned, not forked: fork servers have ended: exit status 3"
    ]
    monkeypatch.undo()
    assert len(ask("where", PoolConfig(preload=("no_such_module_anywhere",)), tp=1)) == 1
    assert "no_such_module_anywhere" in caplog.records[-1].getMessage()


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process.pid)
    return found


def test_a_driver_killed_at_any_moment_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"MARK_{random.getrandbits(64):x}"
    monkeypatch.setenv(mark, "1")
    driver = Driver("repeat", command=[str(DRIVERS)])
    try:
        driver.says()
        time.sleep(random.uniform(0, 4.0))  # its fork server starts, then one pool after another
    finally:
        driver.process.kill()
        driver.process.communicate()
    monkeypatch.delenv(mark)
    until(lambda: marked(mark) == [])


def test_a_preloaded_module_is_loaded_by_the_server(tmp_path: Path) -> None:
    (tmp_path / "loaded_once.py").write_text("import os\nLOADED_IN = os.getpid()\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with WorkerPool(Worker, tp=2, config=PoolConfig(preload=("loaded_once",))) as pool:
            (one, other) = pool.collective_rpc("loaded_in", args=("loaded_once",))
            assert one == other
            assert one in [server.pid for server in servers()]
    finally:
        sys.path.remove(str(tmp_path))
