"""Signal handlers that raise, shut the pool down or ask it, at any moment of a call."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest

import server
import shm_broadcast
from server.calls.call_table import CallTable
from server.calls.dispatcher import Dispatcher
from server.calls.pending_call import CallFuture
from server.config import PoolConfig
from server.driver.pool_driver import PoolDriver
from server.driver.supervisor import Supervisor
from server.errors import PoolClosedError, StreamLostError, WorkerError
from server.launchers import local
from server.launchers.fork_servers import ChildProcess
from server.launchers.local import LocalWorker
from server.pool import WorkerPool
from shm_broadcast import MessageDecodeError
from shm_broadcast.state.stacks import read_stacks
from shm_broadcast.state.table import Slots
from tests.interruptions import LIBRARY, interruptions
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.workers import Gate, Restored, Worker
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERRUPTS = 50

EVERY = 8
"""One of so many places in a call is interrupted."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(Worker, tp=2, config=PoolConfig(settle_seconds=PATIENCE_SECONDS)) as pool:
        yield pool


AMID = "was raised amid the sending of a call or the receiving of a reply"


@pytest.fixture(scope="module")
def restarted_pool() -> Iterator[WorkerPool]:
    config = PoolConfig(settle_seconds=PATIENCE_SECONDS, leave_seconds=PATIENCE_SECONDS)
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=10_000, config=config) as pool:
        yield pool


OnAlarm: TypeAlias = Callable[[Callable[[], object]], None]


@pytest.fixture
def on_alarm() -> Iterator[OnAlarm]:
    before = signal.getsignal(signal.SIGALRM)

    def arrange(do: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: do())

    yield arrange
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("timeout", [None, 600.0])
@pytest.mark.parametrize("ask", [CallFuture.result, CallFuture.exception])
def test_a_handler_s_time_out_is_its_own(
    on_alarm: OnAlarm, ask: Callable[[CallFuture, float | None], object], timeout: float | None
) -> None:
    on_alarm(Mock(side_effect=TimeoutError("by the handler")))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(TimeoutError, match="by the handler"):
        ask(CallFuture(), timeout)


def when(reached: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:

    def wait() -> None:
        until(reached)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def interrupt_main(number: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


def test_an_interrupted_caller_leaves_the_pool_usable(pool: WorkerPool, gate: Gate) -> None:
    """As a console's Ctrl-C: the call goes on, its reply is taken and dropped."""
    interrupting = when(lambda: gate.reached(0), lambda: interrupt_main(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pool.call("hold", gate)
    interrupting.join()
    gate.open()
    assert pool.call("echo", "after", timeout=30) == "after"
    assert pool.failure is None


def one_of_a_stream(pool: WorkerPool) -> None:
    stream = pool.stream("count", 3)
    next(stream)
    stream.close()


CALLS: dict[str, Callable[[WorkerPool], object]] = {
    "of all": lambda pool: pool.collective_rpc("where", timeout=PATIENCE_SECONDS),
    "of one": lambda pool: pool.collective_rpc("where", unique_reply_rank=1),
    "large": lambda pool: pool.call("echo", np.ones(300_000, np.uint8)),
    "begun": lambda pool: [each.result() for each in [pool.submit("echo", n) for n in range(3)]],
    "whole stream": lambda pool: list(pool.stream("count", 2)),
    "stream let go of": one_of_a_stream,
    "that fails": lambda pool: pool.call("fail", [0]),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a __del__
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupted_call_is_abandoned_or_breaks_the_pool(
    restarted_pool: WorkerPool, call: Callable[[WorkerPool], object]
) -> None:
    pool = restarted_pool

    def make() -> None:
        with suppress(WorkerError, StreamLostError):
            call(pool)

    before = pool.restarts
    for number, _ in enumerate(interruptions(make, server, shm_broadcast, every=EVERY)):
        assert pool.call("echo", number, timeout=PATIENCE_SECONDS, retry=True) == number
        until(lambda: pool.load == 0)
    assert number > 2
    assert pool.restarts - before <= number
    assert pool.last_failure is None or AMID in str(pool.last_failure[1])


def wake_collector_only_for_others(
    dispatcher: Dispatcher, *, wake: Callable[[Dispatcher], None] = Dispatcher._wake_collector
) -> None:
    """Have the main thread listen for the replies to its own calls, unless the collector does."""
    if threading.current_thread() is not threading.main_thread():
        wake(dispatcher)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a weak set
def test_an_interrupted_wait_for_a_future_holds_up_no_other_call(pool: WorkerPool) -> None:
    def wait() -> None:
        with suppress(RuntimeError):  # a lock of Python's that it releases, and has not
            pool.submit("echo", "interrupted").result()

    for number, _ in enumerate(interruptions(wait, server, LIBRARY)):
        assert pool.submit("echo", number).result(PATIENCE_SECONDS) == number
    assert number > 20


def test_a_pool_that_is_interrupted_as_it_breaks_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PoolConfig(leave_seconds=PATIENCE_SECONDS)
    with WorkerPool(Restored, tp=2, restart="worker", max_restarts=10_000, config=config) as pool:

        def collector_rests() -> bool:
            with pool._driver.dispatcher._listening as mine:
                return mine

        def make() -> None:
            with suppress(WorkerError), monkeypatch.context() as changed:
                changed.setattr(Dispatcher, "_wake_collector", wake_collector_only_for_others)
                pool.call("send_then_fail")

        for number, _ in enumerate(interruptions(make, server.calls)):
            # It may be sent before the pool breaks.
            assert pool.call("echo", number, timeout=PATIENCE_SECONDS, retry=True) == number
            until(lambda: pool.load == 0 and collector_rests())
        assert pool.restarts > 0
    assert number > 20


class ShutDownError(BaseException):
    """What a handler raises that has shut the pool down, as a program that ends does."""


def shut_down(pool: WorkerPool, *, raises: bool = True) -> None:
    pool.shutdown(1.0)
    if raises:
        raise ShutDownError


@contextmanager
def held(gate: Gate) -> Iterator[WorkerPool]:
    pool = WorkerPool(Worker)
    call = pool.submit("hold", gate)
    until(lambda: gate.reached(0))
    yield pool
    with pytest.raises(PoolClosedError):
        call.result(PATIENCE_SECONDS)
    with pytest.raises(PoolClosedError):
        pool.status()


def shut_down_at_random(rank: int, n: int) -> None:
    warm_fork_servers()
    moments = random.Random(1)
    for _ in range(6):
        called = WorkerPool(Worker)
        signal.signal(signal.SIGALRM, lambda *_, called=called: shut_down(called))
        with suppress(ShutDownError):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-3, 10e-3))
            while True:
                called.call("echo", 1)


def test_a_handler_may_shut_down_at_any_moment_of_a_call() -> None:
    run_ranks(1, shut_down_at_random, timeout=200)


def raising_the_alarm(wrapped: Any) -> Any:
    called: list[None] = []

    def raising(*args: Any, **kwargs: Any) -> Any:
        called.append(None)
        if len(called) == 1:
            os.kill(os.getpid(), signal.SIGALRM)
        return wrapped(*args, **kwargs)

    return raising


SHUTTING_DOWN = [
    (PoolDriver, "_end"),
    (Supervisor, "stop"),
    (Dispatcher, "release"),
    (CallTable, "release"),
    (LocalWorker, "ended"),
    (LocalWorker, "close"),
    (ChildProcess, "wait"),
]
"""What a shutdown calls, in its order."""


@pytest.mark.parametrize("place", SHUTTING_DOWN, ids=lambda place: place[1])
def test_a_handler_may_shut_down_amid_a_shutdown(
    place: tuple[type, str], gate: Gate, monkeypatch: pytest.MonkeyPatch, on_alarm: OnAlarm
) -> None:
    """As the second SIGTERM of an impatient supervisor."""
    kind, name = place
    with held(gate) as pool:
        on_alarm(lambda: shut_down(pool))
        monkeypatch.setattr(kind, name, raising_the_alarm(getattr(kind, name)))
        with pytest.raises(ShutDownError):
            pool.shutdown(1.0)


def test_a_handler_may_finish_a_shutdown(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, on_alarm: OnAlarm
) -> None:
    with held(gate) as pool:
        on_alarm(lambda: shut_down(pool, raises=False))
        monkeypatch.setattr(PoolDriver, "_end", raising_the_alarm(PoolDriver._end))
        pool.shutdown(1.0)


def test_a_handler_may_shut_down_a_pool_that_counts(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, on_alarm: OnAlarm
) -> None:
    with held(gate) as pool:
        on_alarm(lambda: shut_down(pool))
        monkeypatch.setattr(Slots, "totals", raising_the_alarm(Slots.totals))
        with pytest.raises(ShutDownError):
            pool.totals()


def test_a_call_whose_pool_a_signal_handler_shuts_down_fails(gate: Gate, on_alarm: OnAlarm) -> None:
    with held(gate) as pool:
        on_alarm(lambda: shut_down(pool, raises=False))
        interrupting = when(lambda: pool.load == 2, lambda: interrupt_main(signal.SIGALRM))
        with pytest.raises(PoolClosedError):
            pool.call("echo")
        interrupting.join()


def test_a_handler_may_join_another_thread_s_shutdown(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, on_alarm: OnAlarm
) -> None:
    """It interrupts a call that holds what the other thread needs to go on."""
    waiting = threading.Event()
    wait_until = PoolDriver._wait_until

    def waits(driver: PoolDriver, *args: Any) -> bool:
        waiting.set()
        return wait_until(driver, *args)

    with held(gate) as pool:
        on_alarm(lambda: shut_down(pool))
        monkeypatch.setattr(PoolDriver, "_wait_until", waits)
        other = threading.Thread(target=pool.shutdown, args=(2.0,))
        other.start()
        assert waiting.wait(PATIENCE_SECONDS)
        monkeypatch.setattr(CallTable, "accept", raising_the_alarm(CallTable.accept))
        with pytest.raises(ShutDownError):
            pool.call("echo")
        other.join(PATIENCE_SECONDS)
        assert not other.is_alive()


def test_a_handler_may_shut_down_as_stacks_are_read(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, on_alarm: OnAlarm
) -> None:
    with held(gate) as pool:
        os.kill(pool.status()[0].pid, signal.SIGSTOP)  # it shows no stack, which is waited for
        on_alarm(lambda: shut_down(pool))
        monkeypatch.setattr(local, "read_stacks", raising_the_alarm(read_stacks))
        with pytest.raises(ShutDownError):
            pool.call("echo", 1, timeout=0.1)


def interrupt_at_random(rank: int, n: int, kind: type[BaseException]) -> None:
    """Calls that a handler interrupts, and two of which each has to be answered right."""
    warm_fork_servers()
    fired = False

    def interrupt(_: int, __: object) -> None:
        nonlocal fired
        fired = True
        raise kind("on time")

    def call_until_interrupted(value: tuple[int, str]) -> None:
        nonlocal fired
        fired = False
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(50e-6, 400e-6))
        while not fired:  # what it raises in a finalizer comes to nobody
            assert pool.call("echo", value, retry=True) == value

    signal.signal(signal.SIGALRM, interrupt)
    moments = random.Random(1)
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=10_000) as pool:
        for number in range(INTERRUPTS):
            # It may raise while a reply is unpickled, or in a lock of the standard library.
            with suppress(kind, MessageDecodeError, RuntimeError):
                call_until_interrupted((number, "interrupted"))
            future = pool.submit("echo", (number, "submitted"))
            assert pool.call("echo", number, timeout=PATIENCE_SECONDS, retry=True) == number
            lost = future.exception(PATIENCE_SECONDS)
            if lost is None:
                assert future.result() == (number, "submitted")
            else:
                assert AMID in str(lost)
        until(lambda: pool.load == 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_interrupts_at_any_moment_mix_up_no_answers(kind: type[BaseException]) -> None:
    run_ranks(1, interrupt_at_random, kind, timeout=300)


def test_a_handler_may_ask_for_the_status_amid_a_call(pool: WorkerPool, on_alarm: OnAlarm) -> None:
    seen: list[int] = []
    on_alarm(lambda: seen.append(len(pool.status())))
    moments = random.Random(1)
    for number in range(INTERRUPTS):
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(50e-6, 400e-6))
        while len(seen) == number:
            assert pool.call("echo", number, timeout=PATIENCE_SECONDS) == number
    assert seen == [2] * INTERRUPTS
