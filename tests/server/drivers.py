"""A driver to be killed, interrupted or left alone: ``python drivers.py WHAT [ARGUMENT]``.

It prints one line of JSON, the pids of its workers and of what they started, before it does what
the test is about. Its own `Here` is a worker class of the main module.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from server.config import PoolConfig
from server.errors import PoolClosedError, WorkerError, WorkerStartError
from server.pool import WorkerPool
from tests.server.workers import Failing, Restored, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future


class Here(Worker):
    def kind(self) -> str:
        return type(self).__qualname__


def say(numbers: list[int]) -> None:
    sys.stdout.write(json.dumps(numbers) + "\n")
    sys.stdout.flush()


def repeat() -> None:
    """Start and end pools, without end; say so at first and each time."""
    say([])
    while True:
        with WorkerPool(Worker, tp=2) as pool:
            say(pool.collective_rpc("start_daemon"))


def wait(pool: WorkerPool, what: str) -> None:
    """Wait in a call; what that is, the test says."""
    pids = [status.pid for status in pool.status()]
    pids += pool.collective_rpc("start_child") + pool.collective_rpc("start_daemon")
    say(pids)
    if what == "idle":
        time.sleep(600)
    elif what == "group":
        pool.call("hang_in_group", 1)
    elif what == "locked":
        pool.call("hold_python", [0, 1])
    else:
        pool.call("sleep", 600.0)


def live() -> None:
    """What pools may live through: their workers end in every way that they can."""
    logging.disable()  # what is lost, and that it was restarted
    with WorkerPool(Restored, tp=2, restart="worker") as pool:
        say(pool.call("python_options"))
        with suppress(WorkerError):
            pool.call("fail", [0])
        os.kill(pool.status()[0].pid, signal.SIGKILL)
        pool.call("total", 1.0, retry=True)
    with WorkerPool(Worker, tp=2) as pool, suppress(WorkerError):
        pool.call("fail_in_group", [0])
    with suppress(WorkerStartError):
        WorkerPool(Failing, tp=2, worker_kwargs={"rank": 0, "how": "raise"})
    with WorkerPool(Worker, config=PoolConfig(fork=False)) as pool, suppress(WorkerError):
        say(pool.call("python_options"))
        pool.call("fail", [0])


def use(pool: WorkerPool, done: Future[str], pending: Future[None]) -> None:
    """Every door is shut in a forked child; what it has been told already it knows."""
    assert done.result() == "told"
    assert isinstance(pool.failure, PoolClosedError)
    assert not pending.cancel()
    doors = (
        *(pool.status, lambda: pool.call("echo"), lambda: pool.submit("echo")),
        *(pending.result, lambda: pending.exception(timeout=600)),
    )
    for door in doors:
        try:
            door()
        except PoolClosedError:
            continue
        os.abort()


def wait_in_pool(argument: str, config: PoolConfig) -> None:
    try:
        with WorkerPool(Worker, tp=2 if config.fork else 1, config=config) as pool:
            wait(pool, argument)
    except KeyboardInterrupt:
        sys.exit(130)


def start() -> None:
    say([])
    try:
        WorkerPool(
            "tests.server.workers:Failing",
            tp=2,
            worker_kwargs={"rank": 0, "how": "hang"},
            on_progress=lambda rank, *_: say([rank]),
        )
    except KeyboardInterrupt:
        sys.exit(130)


def forget(argument: str) -> None:
    pool = WorkerPool(Worker)
    say([pool.call("where")[1]])
    pool.submit("sleep", 600.0)
    if argument == "raise":
        raise ValueError("the driver's own")


def fork(behaviours: Sequence[str]) -> None:
    """Fork a child that behaves so, one after the other, and call the pool after each."""
    pool = WorkerPool(Worker)
    say([pool.call("where")[1]])
    for behaviour in behaviours:
        done, pending = pool.submit("echo", "told"), pool.submit("sleep", 1.0)
        done.result()
        child = os.fork()
        if child == 0:
            if behaviour == "outlive":
                signal.pause()
            elif behaviour == "shutdown":
                pool.shutdown()
            elif behaviour == "block":
                with pool:
                    raise ValueError("the child's own")
            elif behaviour == "use":
                use(pool, done, pending)
            elif behaviour == "own":
                with WorkerPool(Worker, tp=2) as own:
                    assert own.collective_rpc("echo", args=(1,)) == [1, 1]
            elif behaviour == "drop":
                del pool
                gc.collect()
            sys.exit(0)
        status = 0 if behaviour == "outlive" else os.wait()[1]
        assert os.waitstatus_to_exitcode(status) == (1 if behaviour == "block" else 0)
        say([pool.call("echo", child, timeout=10)])
    signal.pause()


def main(what: str, argument: str = "", start_by: str = "fork") -> None:
    gc.freeze()  # what was imported stays: the last collection passes it by
    config = PoolConfig(fork=start_by == "fork")
    if what == "wait":
        wait_in_pool(argument, config)
    elif what == "live":
        live()
    elif what == "import":
        sys.path.insert(0, argument)
        importlib.import_module("service")
    elif what == "repeat":
        repeat()
    elif what == "start":
        start()
    elif what == "forget":
        forget(argument)
    elif what == "drop":
        say([WorkerPool(Worker).call("where")[1]])
        time.sleep(600)
    elif what == "fork":
        fork(argument.split(","))
    elif what == "outlasting":
        with WorkerPool(Worker) as pool:
            pool.call("start", argument, 1.5)
    elif what == "main":
        with WorkerPool(Here) as pool:
            say([pool.call("where")[1], len(pool.call("kind"))])


if __name__ == "__main__":
    main(*sys.argv[1:])
