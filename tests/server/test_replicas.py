"""Replicas that fail apart: who gets a call, what moves over, and what a client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from server.config import PoolConfig
from server.driver.binding import worker_threads
from server.errors import (
    CallTimeoutError,
    PoolClosedError,
    RestartLimitError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
)
from server.inspection.snapshot import of_process, programs, scan
from server.pool import WorkerPool
from server.replicas import Replicas
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.programs import Program
from tests.server.workers import Gate, OneIsLate, Unlucky, Worker, pids_of

if TYPE_CHECKING:
    from server.worker import WorkerContext

PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)


@pytest.fixture
def gates(tmp_path: Path) -> list[Gate]:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    return [Gate(folder) for folder in folders]


def test_replicas_are_pools_of_their_own_that_share_the_cores() -> None:
    async def awaited() -> tuple[Any, list[int]]:
        items = [item async for item in replicas.astream("count", 3)]
        return await replicas.acall("echo", 1), items

    with Replicas(Worker, dp=2, tp=2) as replicas:
        assert replicas.n_workers == 4
        assert [status.rank for status in replicas.status()] == [0, 1, 2, 3]
        assert (replicas.failure, replicas.restarting, replicas.restarts) == (None, None, 0)
        assert replicas.call("environment")["threads"] == worker_threads(4)
        assert replicas.grid.coordinates(3) == {"dp": 1, "pp": 0, "pcp": 0, "tp": 1}
        for _ in range(4):
            assert replicas.call("total", 1.0) == 2.0
        totals = [
            each.ended
            for of_rank in replicas.totals().values()
            for each in of_rank
            if each.verb == "all_reduce"
        ]
        assert totals == [2] * 4
        assert list(replicas.stream("count", 3)) == [0, 1, 2]
        assert asyncio.run(awaited()) == (1, [0, 1, 2])
        pids = [pids_of(pool)[0] for pool in replicas.pools]
        seen = scan()
        (mine,) = of_process(os.getpid(), seen, programs(seen))
    found = {board.name: board.members[0].status.pid for board in mine.boards}
    assert found.items() >= {"replica 0": pids[0], "replica 1": pids[1]}.items()


def test_a_call_goes_to_the_replica_that_has_the_fewest(gates: list[Gate]) -> None:
    with Replicas(Worker, dp=3) as replicas:
        pids = [pids_of(pool)[0] for pool in replicas.pools]
        held = [replicas.submit("hold", gate) for gate in gates]
        until(lambda: all(gate.reached(0) for gate in gates))
        (free,) = [pool for pool in replicas.pools if pool.load == 0]
        answered = {replicas.call("where")[1] for _ in range(5)}
        assert answered == {pids[replicas.pools.index(free)]}
        for gate in gates:
            gate.open()
        assert [future.result(PATIENCE_SECONDS) for future in held] == [0, 0]
        assert {replicas.call("where")[1] for _ in range(6)} == {*pids}


def test_while_none_works_calls_that_may_move_wait_for_the_first_that_does(
    gates: list[Gate],
) -> None:
    late, early = gates
    with Replicas(OneIsLate, dp=2, worker_kwargs={"gates": gates}, restart="worker") as replicas:
        for pid in [pids_of(pool)[0] for pool in replicas.pools]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(gate.reached(0) for gate in gates))
        stays = [replicas.submit("echo") for _ in replicas.pools]
        waiting = [replicas.submit("echo", number, retry=True) for number in range(6)]
        assert [pool.load for pool in replicas.pools] == [4, 4]
        early.open()
        assert [future.result(PATIENCE_SECONDS) for future in waiting] == [*range(6)]
        assert [pool.restarting is None for pool in replicas.pools].count(False) == 1
        assert [future.done() for future in stays].count(False) == 1
        late.open()
        for future in stays:
            future.result(PATIENCE_SECONDS)
        until(lambda: len(replicas._working()) == 2)
        for pid in [pids_of(pool)[0] for pool in replicas.pools]:
            os.kill(pid, signal.SIGKILL)
        calls = [replicas.submit("echo", turn, retry=True) for turn in range(20)]
        assert [call.result(PATIENCE_SECONDS) for call in calls] == list(range(20))
        until(lambda: replicas.restarts == 4)


def test_only_calls_that_may_be_made_again_move_over_and_the_replica_comes_back(
    gate: Gate,
) -> None:
    """Each replica has two calls and two that are queued; one of both may be made again."""
    with Replicas(Worker, dp=2, config=PATIENT) as replicas:
        held = [replicas.submit("hold", gate, retry=turn % 4 > 1) for turn in range(8)]
        until(lambda: gate.reached(0))
        first, second = replicas.pools
        os.kill(first.status()[0].pid, signal.SIGKILL)
        until(lambda: second.load == 6)
        lost = [future for future in held if future.done()]
        assert len(lost) == 2
        for future in lost:
            assert isinstance(future.exception(), WorkerLostError)
        until(lambda: replicas.restarts == 1)
        echoed = replicas.submit("echo", "here")
        assert echoed.result(PATIENCE_SECONDS) == "here"
        gate.open()
        for future in held:
            if future not in lost:
                assert future.result(PATIENCE_SECONDS) == 0


def test_clients_notice_nothing_of_a_replica_that_always_dies() -> None:
    def ask(base: int) -> list[Any]:
        return [replicas.call("echo", base + turn, retry=True) for turn in range(100)]

    with Replicas(Worker, dp=2, max_restarts=10_000) as replicas, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, n * 1000) for n in range(4)]
        while not all(each.done() for each in asked):
            with suppress(ProcessLookupError):  # it has not been replaced yet
                os.kill(replicas.pools[0].status()[0].pid, signal.SIGKILL)
            time.sleep(0.05)
    for n, each in enumerate(asked):
        assert each.result() == [n * 1000 + turn for turn in range(100)]


def test_errors_name_the_replica(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.driver.pool_driver")

    def where_from(error: BaseException) -> str:
        return str(error).partition(": ")[0]

    with Replicas(Worker, dp=2) as replicas:
        for number, pool in enumerate(replicas.pools):
            here = f"replica {number}"
            (pid,) = pids_of(pool)
            title = f"group-coordinator worker 0 of replica {number}"
            assert psutil.Process(pid).cmdline()[0].rstrip("\0") == title
            pool.call("say", f"said in {number}")
            with pytest.raises(WorkerError) as failed:
                pool.call("fail", [0])
            with pytest.raises(CallTimeoutError) as late:
                pool.call("sleep", 0.2, timeout=0.1)
            with pytest.raises(WorkerLostError) as lost:
                pool.call("exit", [0], 3)
            assert [where_from(each.value) for each in (failed, late, lost)] == [here] * 3
            assert f"rank 0 (pid {pid}) of replica {number} was lost: exit status 3" in caplog.text
            until(lambda: replicas.restarts > number)  # noqa: B023 - called at once
        lines = capfd.readouterr().out.splitlines()
        assert lines == [f"[replica {number}, rank 0] said in {number}" for number in range(2)]
    with pytest.raises(WorkerStartError) as unlucky:
        Replicas(Unlucky, dp=2, worker_kwargs={"raises": [1], "hangs": []})
    assert where_from(unlucky.value) in ("replica 0", "replica 1")
    children = psutil.Process().children()
    assert [child for child in children if child.name() == "pool-reaper"] == []
    with pytest.raises(WorkerStartError) as alone:
        WorkerPool(
            Unlucky, worker_kwargs={"raises": [1], "hangs": []}, config=PoolConfig(name="alpha")
        )
    assert where_from(alone.value) == "alpha"


def test_replicas_that_are_not_restarted_end_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with Replicas(Worker, dp=2, restart="never") as replicas:
        with pytest.raises(WorkerLostError):
            replicas.call("exit", [0], 3)
        assert replicas.failure is None
        assert {replicas.call("echo", turn) for turn in range(4)} == {0, 1, 2, 3}
        with pytest.raises(WorkerLostError):
            replicas.call("exit", [0], 4)
        for refused in (replicas.call, replicas.submit):
            with pytest.raises(WorkerLostError, match="rank 0"):
                refused("echo")
        assert isinstance(replicas.failure, WorkerLostError)
    ends = [each.getMessage() for each in caplog.records if "no more calls" in each.getMessage()]
    assert [end.partition(": ")[0][len("replica n ") :] for end in ends] == [
        "takes no more calls, 1 of 2 go on",
        "takes no more calls, 0 of 2 go on",
    ]
    assert ["exit status 3" in ends[0], "exit status 4" in ends[1]] == [True, True]


def test_replicas_of_which_one_was_lost_have_not_failed_when_they_are_shut_down() -> None:
    with Replicas(Worker, dp=2, restart="never") as replicas:
        os.kill(pids_of(replicas.pools[1])[0], signal.SIGKILL)
        until(lambda: replicas.pools[1].failure is not None)
        assert replicas.failure is None
    assert isinstance(replicas.failure, PoolClosedError)


def test_a_replica_that_broke_too_often_gives_its_calls_away(gate: Gate) -> None:
    with Replicas(Worker, dp=2, max_restarts=1, config=PATIENT) as replicas:
        first, second = replicas.pools
        os.kill(first.status()[0].pid, signal.SIGKILL)
        until(lambda: first.restarts == 1)
        held = [replicas.submit("hold", gate, retry=turn % 4 > 1) for turn in range(8)]
        until(lambda: first.load == 4)
        os.kill(first.status()[0].pid, signal.SIGKILL)
        until(lambda: isinstance(first.failure, RestartLimitError))
        until(lambda: second.load == 6)
        gate.open()
        errors = [future.exception(PATIENCE_SECONDS) for future in held]
        assert [type(error) for error in errors if error] == [WorkerLostError] * 2


class Slow(Worker):
    def __init__(self, context: WorkerContext, folder: str) -> None:
        super().__init__(context)
        Path(folder, str(os.getpid())).touch()
        time.sleep(600)


def end_while_replicas_start(folder: str) -> None:
    given: dict[str, Any] = {"dp": 2, "worker_kwargs": {"folder": folder}}
    threading.Thread(target=Replicas, args=(Slow,), kwargs=given, daemon=True).start()
    until(lambda: len([*Path(folder).iterdir()]) == 2)


def test_a_program_that_ends_does_not_wait_for_replicas_that_start(tmp_path: Path) -> None:
    program = Program(end_while_replicas_start, str(tmp_path))
    _, errors = program.communicate()
    assert program.returncode == 0, errors
    workers = [int(each.name) for each in tmp_path.iterdir()]
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers))


def test_shutdown_ends_all_and_refuses_calls(gate: Gate) -> None:
    """Its callbacks run in the thread that ends the calls, and may ask for the end, too."""
    replicas, caught = Replicas(Worker, dp=2), list[str]()

    def shut_down(_: object) -> None:
        try:
            replicas.shutdown()
        except RuntimeError as error:
            caught.append(str(error))

    pids = [status.pid for status in replicas.status()]
    answered = replicas.submit("hold", gate)
    answered.add_done_callback(shut_down)
    gate.open()
    until(lambda: caught)
    assert caught == ["replicas cannot be shut down by a callback of their own"]
    assert replicas.call("echo", 1) == 1
    waiting = [replicas.submit("sleep", 600.0) for _ in range(2)]
    waiting[0].add_done_callback(shut_down)
    ending = threading.Thread(target=replicas.shutdown, args=(1.0,), daemon=True)
    ending.start()
    ending.join(3.0 + STALL_SECONDS)
    assert not ending.is_alive()
    for future in waiting:
        assert isinstance(future.exception(0), PoolClosedError)
    with pytest.raises(PoolClosedError):
        replicas.submit("echo")
    assert isinstance(replicas.failure, PoolClosedError)
    until(lambda: not any(map(psutil.pid_exists, pids)))
