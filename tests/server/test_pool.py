"""Calls to a pool that works: one pool of two workers for all tests of this file."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from server.config import PoolConfig
from server.errors import WorkerError
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast import MessageDecodeError, SharedMemoryError
from tests.patience import PATIENCE_SECONDS, until
from tests.server.workers import BadInputError, Gate, Undecodable, Unpicklable, Worker
from tests.shm_broadcast.leaks import no_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    patient = PoolConfig(settle_seconds=30.0, stack_seconds=30.0)
    with WorkerPool(Worker, tp=2, worker_kwargs={"size": 3}, config=patient) as pool:
        yield pool


def test_every_rank_is_a_process_that_was_given_the_arguments(pool: WorkerPool) -> None:
    places = pool.collective_rpc("where")
    assert [rank for rank, _ in places] == [0, 1]
    assert len({os.getpid(), *(pid for _, pid in places)}) == 3
    assert pool.collective_rpc("given") == [{"size": 3}, {"size": 3}]
    assert [status.pid for status in pool.status()] == [pid for _, pid in places]
    for there, (_, pid) in zip(pool.collective_rpc("environment"), places, strict=True):
        assert (there["path"], there["folder"]) == (sys.path, str(Path.cwd()))
        assert (there["device"], there["session"]) == (torch.device("cpu"), pid)


def test_one_reply_may_be_wanted(pool: WorkerPool) -> None:
    assert pool.collective_rpc("where", unique_reply_rank=1)[0] == 1
    assert pool.call("where")[0] == 0
    assert pool.collective_rpc("echo", args=("a",)) == ["a", "a"]
    assert pool.collective_rpc("echo", kwargs={"value": "b"}) == ["b", "b"]
    with pytest.raises(ValueError, match=r"unique_reply_rank must be 0 to 1; got 2"):
        pool.collective_rpc("where", unique_reply_rank=2)


def test_data_parallel_ranks_each_give_a_result_and_none_alone() -> None:
    with WorkerPool(Worker, dp=2) as pool:
        assert [rank for rank, _ in pool.collective_rpc("where", timeout=30)] == [0, 1]
        assert pool.collective_rpc("where", 30, unique_reply_rank=1)[0] == 1
        for refused in (pool.call, pool.submit):
            with pytest.raises(ValueError, match="each of dp=2 replicas computes one"):
                refused("where")
        with pytest.raises(ValueError, match="call and submit return one result"):
            pool.stream("count", 1)


def test_where_no_loop_of_asyncio_runs_nothing_is_sent(pool: WorkerPool) -> None:
    for begun in (pool.acall("sleep", 0.5), anext(pool.astream("by_name_in_turn"))):
        with pytest.raises(RuntimeError, match="no running event loop"):
            begun.send(None)
        assert pool.load == 0


def test_a_workers_argument_may_have_the_name_of_one_of_the_pools(pool: WorkerPool) -> None:
    names = {"method": "int8", "args": 1, "kwargs": 2, "rank": 3}

    async def awaited(called: WorkerPool | Replicas) -> tuple[Any, list[Any]]:
        items = [item async for item in called.astream("by_name_in_turn", **names)]
        return await called.acall("by_name", **names), items

    with Replicas(Worker, dp=1) as replicas:
        for called in (pool, replicas):
            assert called.call("by_name", **names) == names
            assert called.submit("by_name", **names).result(PATIENCE_SECONDS) == names
            assert list(called.stream("by_name_in_turn", **names)) == [*names.items()]
            assert asyncio.run(awaited(called)) == (names, [*names.items()])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"unique_reply_rank": 1.0}, "unique_reply_rank must be a whole number; got 1.0"),
        ({"unique_reply_rank": "0"}, "unique_reply_rank must be a whole number; got '0'"),
        ({"unique_reply_rank": True}, "unique_reply_rank must be a whole number; got True"),
        ({"args": 5}, "args must be a sequence of arguments; got 5"),
        ({"args": "ab"}, "args must be a sequence of arguments; got 'ab'"),
        ({"kwargs": [1]}, r"kwargs must be a mapping of arguments by name; got \[1\]"),
    ],
)
def test_wrong_arguments_are_refused(pool: WorkerPool, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        pool.collective_rpc("note", **wrong)


@pytest.mark.parametrize("method", ["_secret", "__init__", "__class__"])
def test_what_is_private_to_a_worker_cannot_be_called(pool: WorkerPool, method: str) -> None:
    for refused in (pool.call, pool.submit, pool.collective_rpc):
        with pytest.raises(ValueError, match=f"method '{method}' is private to the worker"):
            refused(method)
    for nameless in ("", "\udc80echo"):
        with pytest.raises(ValueError, match="is no method's name"):
            pool.call(nameless)
    with pytest.raises(TypeError, match="method must be the name"):
        pool.call(Worker.echo)
    assert pool.call("echo", 1) == 1


@pytest.mark.parametrize("size", [0, 1000, 3 << 20])
def test_tensors_travel_both_ways(pool: WorkerPool, size: int) -> None:
    sent = torch.arange(size, dtype=torch.float32)
    assert torch.equal(pool.call("echo", sent), sent)
    assert np.array_equal(pool.call("echo", sent.numpy()), sent.numpy())
    for rank, ones in enumerate(pool.collective_rpc("ones", args=(size,))):
        assert torch.equal(ones, torch.full((size,), float(rank)))


@pytest.mark.parametrize(
    ("method", "ranks"), [("fail", [0, 1]), ("fail", [1]), ("fail_after_reduce", [1])]
)
def test_an_exception_fails_its_call_only(pool: WorkerPool, method: str, ranks: list[int]) -> None:
    for _ in range(3):
        with pytest.raises(WorkerError, match=r"BadInputError: ") as raised:
            pool.call(method, ranks)
        assert raised.value.rank in ranks
        assert isinstance(raised.value.__cause__, BadInputError)
        assert "raise BadInputError(" in raised.value.traceback
        assert pool.collective_rpc("total", args=(1.5,)) == [3.0, 3.0]


def test_calls_among_failed_ones_are_not_mixed_up_with_them(pool: WorkerPool) -> None:
    """A report of a failure may overtake replies to earlier calls."""
    calls: list[tuple[str, Any]] = [
        ("total", turn) if turn % 2 else ("fail", [0, 1]) for turn in range(200)
    ]
    calls[::3] = [("fail_after_reduce", [1])] * len(calls[::3])
    futures = [pool.submit(method, argument) for method, argument in calls]
    for (method, argument), future in zip(calls, futures, strict=True):
        if method == "total":
            assert future.result(timeout=30) == 2.0 * argument
        else:
            assert isinstance(future.exception(timeout=30), WorkerError)


@pytest.mark.parametrize(
    ("method", "kwargs", "text"),
    [
        ("fail_oddly", {}, "UnpicklableError: 1 and 2"),
        ("fail_of_itself", {}, "BadInputError: of itself"),  # it is its own cause
        ("leave", {}, "SystemExit: 3"),
        ("absent", {}, r"AttributeError: .*no attribute 'absent'"),
        ("é" * 100, {}, "AttributeError"),
        ("x" * 1000, {}, "AttributeError"),
        ("echo", {"wrong": 1}, r"TypeError: .*unexpected keyword"),
    ],
)
def test_any_exception_comes_back(
    pool: WorkerPool, method: str, kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(WorkerError, match=text):
        pool.call(method, timeout=PATIENCE_SECONDS, **kwargs)


def test_what_cannot_travel_fails_its_call_only(pool: WorkerPool) -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    for given, why in ((Unpicklable(), "this cannot be pickled"), (nested, "maximum recursion")):
        with pytest.raises(TypeError, match=f"the arguments of echo cannot be sent: {why}"):
            pool.call("echo", given)
        with pytest.raises(WorkerError, match="MessageDecodeError"):  # the number is used again
            pool.call("echo", Undecodable(), timeout=PATIENCE_SECONDS)
    for kind, why in (
        ("unpicklable", "its result, of type Unpicklable, cannot be sent: this cannot be pickled"),
        ("lambda", "its result, of type function, cannot be sent: Can't pickle local object"),
        ("generator", "of type generator, cannot be sent: iterate over pool.stream"),
        ("coroutine", "of type coroutine, cannot be sent: make it a plain method, and await"),
        ("asynchronous generator", "cannot be sent: make it a plain generator, and iterate over"),
    ):
        with pytest.raises(WorkerError, match=why):
            pool.call("make", kind)
    with pytest.raises(MessageDecodeError, match="invalid literal"):
        pool.call("make", "undecodable")
    assert isinstance(pool.submit("echo", Unpicklable()).exception(timeout=30), TypeError)
    assert pool.call("echo", "fine") == "fine"


def test_futures_are_done_in_order(pool: WorkerPool) -> None:
    done: list[int] = []
    pool.collective_rpc("note", args=(-1,))
    before = len(pool.call("note", -1))
    futures = [pool.submit("note", turn) for turn in range(50)]
    for turn, future in enumerate(futures):
        future.add_done_callback(lambda _, turn=turn: done.append(turn))  # type: ignore[misc]
    assert [future.result(timeout=30)[before:] for future in futures] == [
        list(range(turn + 1)) for turn in range(50)
    ]
    assert done == list(range(50))


def test_queued_calls_can_be_cancelled(pool: WorkerPool, gate: Gate) -> None:
    futures = [pool.submit("hold", gate) for _ in range(3)]
    last = pool.submit("note", 1000)
    assert pool.load == 4
    assert last.cancel()
    assert wait([last], PATIENCE_SECONDS / 10).done == {last}
    assert pool.load == 3  # what nobody waits for keeps no call away
    gate.open()
    assert [future.result(timeout=30) for future in futures] == [0, 0, 0]
    with pytest.raises(CancelledError):
        last.result(timeout=0)
    assert 1000 not in pool.call("note", 1001)


def test_threads_call_at_once_and_each_gets_its_own_answer(pool: WorkerPool) -> None:
    wrong: list[Any] = []

    def many(thread: int) -> bool:
        for turn in range(100):
            asked = (thread, turn)
            if turn % 3 == 0:
                answers = [pool.call("echo", asked, timeout=60)]
            elif turn % 3 == 1:
                answers = [pool.submit("echo", asked).result(timeout=60)]
            else:
                answers = pool.collective_rpc("echo", 60, (asked,))
            wrong.extend(answer for answer in answers if answer != asked)

        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(many, range(8), timeout=120))
    assert wrong == []


def test_a_call_amid_the_end_of_collecting_is_answered(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = pool._driver.dispatcher
    stops, waits = threading.Event(), threading.Event()
    observe, wait = dispatcher._spin.observe, dispatcher._wait_for_other_listener
    table, before = dispatcher._table, dispatcher._table.last

    def stop_listening(*args: int) -> None:
        observe(*args)
        answered = table.last > before and not table.in_flight
        if threading.current_thread().name == "pool-collector" and answered:
            stops.set()
            assert waits.wait(PATIENCE_SECONDS)

    def wait_for_other_listener(*args: Any) -> None:
        waits.set()
        wait(*args)

    monkeypatch.setattr(dispatcher._spin, "observe", stop_listening)
    monkeypatch.setattr(dispatcher, "_wait_for_other_listener", wait_for_other_listener)
    future = pool.submit("echo", 1)
    assert stops.wait(PATIENCE_SECONDS)
    assert pool.call("echo", 2, timeout=PATIENCE_SECONDS / 2) == 2
    assert future.result(PATIENCE_SECONDS) == 1


def test_large_calls_and_large_replies_cross(pool: WorkerPool) -> None:
    """A thread that receives never waits to send: 8 MiB each way through rings of 4 and 2."""
    sent = [torch.full((2 << 20,), float(turn)) for turn in range(6)]
    futures = [pool.submit("echo", tensor) for tensor in sent]
    again = [pool.call("echo", tensor, timeout=60) for tensor in sent]
    for tensor, future, answer in zip(sent, futures, again, strict=True):
        assert torch.equal(future.result(timeout=60), tensor)
        assert torch.equal(answer, tensor)


def test_a_callback_that_ends_its_thread_ends_no_thread_of_the_pools(pool: WorkerPool) -> None:
    def end(_: object) -> None:
        raise SystemExit

    future = pool.submit("echo", 1)
    future.add_done_callback(end)
    assert future.result(PATIENCE_SECONDS) == 1
    assert pool.submit("echo", 2).result(PATIENCE_SECONDS) == 2


def test_a_future_may_get_its_result_from_its_owner(pool: WorkerPool, gate: Gate) -> None:
    held = [pool.submit("hold", gate) for _ in range(3)]
    queued = [pool.submit("note", number) for number in (2100, 2101)]
    until(lambda: gate.reached(0))
    held[0].set_result("mine")
    queued[0].set_result("mine")
    queued[1].set_exception(KeyError("mine"))
    gate.open()
    assert [future.result(PATIENCE_SECONDS) for future in held[1:]] == [0, 0]
    assert not {2100, 2101} & {*pool.call("note", 2102)}
    assert held[0].result() == queued[0].result() == "mine"
    assert isinstance(queued[1].exception(), KeyError)


def test_a_method_may_report_progress() -> None:
    told: list[tuple[int, int, int, str]] = []
    with WorkerPool(Worker, on_progress=lambda *what: told.append(what)) as pool:
        for wrong in ((0.5, 1, "loading"), (1, 2, None)):
            with pytest.raises(WorkerError, match="report_progress takes two ints and a text"):
                pool.call("report", *wrong)
        pool.call("progress", 3)
        until(lambda: len(told) >= 3)
    assert told == [(0, 1, 3, "later"), (0, 2, 3, "later"), (0, 3, 3, "later")]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_large_results_stay_where_the_worker_has_put_them_if_asked_to(zero_copy: bool) -> None:
    with WorkerPool(Worker, tp=2, config=PoolConfig(zero_copy=zero_copy)) as pool:
        for n in (10, 1_000_000):
            first, second = pool.collective_rpc("ones", args=(n,))
            assert (first == 0).all() and (second == 1).all() and len(second) == n
            assert in_shared_memory(second) == (zero_copy and n > 10)
        kept = [pool.collective_rpc("ones", args=(400_000 + turn,)) for turn in range(8)]
    for turn, (first, second) in enumerate(kept):
        assert len(first) == len(second) == 400_000 + turn
        assert (first == 0).all() and (second == 1).all()


def test_a_result_for_which_no_descriptor_is_left_fails_its_call_and_those_behind_it() -> None:
    """As long as there is none: their answers lie behind it."""
    with WorkerPool(Worker, config=PoolConfig(zero_copy=True)) as pool:
        pool.call("ones", 1_000_000)
        kept = pool.call("ones", 1_000_000)  # the next one is in memory not seen before
        with no_descriptors():
            for n in (2_000_000, 3):
                late = pool.submit("ones", n)
                with pytest.raises(
                    SharedMemoryError,
                    match=r"reply of rank 0 to ones cannot be read: .* open files",
                ):
                    late.result(PATIENCE_SECONDS)
        assert pool.submit("ones", 3).result(PATIENCE_SECONDS).tolist() == [0.0] * 3
        assert len(kept) == 1_000_000


def in_shared_memory(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "/memfd:" in line
    raise AssertionError("it is not mapped")
