"""Calls to a pool that works: one pool of two workers for all tests of this file."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerError
from server.pool import WorkerPool
from shm_broadcast import MessageDecodeError, SharedMemoryError
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
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


def test_workers_have_the_drivers_path_and_folder_and_a_session_of_their_own(
    pool: WorkerPool,
) -> None:
    for there, (_, pid) in zip(
        pool.collective_rpc("environment"), pool.collective_rpc("where"), strict=True
    ):
        assert there["path"] == sys.path
        assert there["folder"] == str(Path.cwd())
        assert there["device"] == torch.device("cpu")
        assert there["session"] == pid


def test_one_reply_may_be_wanted(pool: WorkerPool) -> None:
    assert pool.collective_rpc("where", unique_reply_rank=1)[0] == 1
    assert pool.call("where")[0] == 0
    assert pool.collective_rpc("echo", args=("a",)) == ["a", "a"]
    assert pool.collective_rpc("echo", kwargs={"value": "b"}) == ["b", "b"]
    with pytest.raises(ValueError, match=r"unique_reply_rank must be 0 to 1; got 2"):
        pool.collective_rpc("where", unique_reply_rank=2)


def test_where_no_loop_of_asyncio_runs_nothing_is_sent(pool: WorkerPool) -> None:
    """As under trio, which has loops of its own."""
    for begun in (pool.acall("sleep", 0.5), anext(pool.astream("by_name_in_turn"))):
        with pytest.raises(RuntimeError, match="no running event loop"):
            begun.send(None)
        assert pool.load == 0


def test_a_workers_argument_may_have_the_name_of_one_of_the_pools(pool: WorkerPool) -> None:
    names = {"method": "int8", "args": 1, "kwargs": 2, "rank": 3}

    async def awaited() -> tuple[Any, list[Any]]:
        items = [item async for item in pool.astream("by_name_in_turn", **names)]
        return await pool.acall("by_name", **names), items

    assert pool.call("by_name", **names) == names
    assert pool.submit("by_name", **names).result(PATIENCE_SECONDS) == names
    assert list(pool.stream("by_name_in_turn", **names)) == [*names.items()]
    assert asyncio.run(awaited()) == (names, [*names.items()])


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
def test_a_call_with_wrong_arguments_is_refused(
    pool: WorkerPool, wrong: dict[str, Any], why: str
) -> None:
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
    assert pool.call("echo", 1) == 1


def test_workers_without_a_call_are_idle(pool: WorkerPool, gate: Gate) -> None:
    pool.call("total", 1.0)
    assert [(status.state, status.operation) for status in pool.status()] == [("idle", "total")] * 2
    held = pool.submit("hold", gate, [1])
    until(lambda: gate.reached(1))
    until(lambda: pool.status()[0].state == "idle")
    busy = pool.status()[1]
    assert (busy.state, busy.operation) == ("busy", "hold")
    gate.open()
    held.result(timeout=30)


def test_workers_use_their_groups(pool: WorkerPool) -> None:
    assert pool.collective_rpc("total", args=(1.5,)) == [3.0, 3.0]


@pytest.mark.parametrize("size", [0, 1000, 3 << 20])
def test_tensors_travel_both_ways(pool: WorkerPool, size: int) -> None:
    sent = torch.arange(size, dtype=torch.float32)
    assert torch.equal(pool.call("echo", sent), sent)
    assert np.array_equal(pool.call("echo", sent.numpy()), sent.numpy())
    for rank, ones in enumerate(pool.collective_rpc("ones", args=(size,))):
        assert torch.equal(ones, torch.full((size,), float(rank)))


def test_an_exception_on_every_rank_reaches_the_caller_and_the_pool_goes_on(
    pool: WorkerPool,
) -> None:
    for _ in range(3):
        with pytest.raises(WorkerError, match=r"BadInputError: bad input") as raised:
            pool.call("fail", [0, 1])
        assert isinstance(raised.value.__cause__, BadInputError)
        assert "raise BadInputError(text)" in raised.value.traceback
        assert pool.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]


def test_an_exception_on_one_rank_names_it_and_the_pool_goes_on(pool: WorkerPool) -> None:
    for method in ("fail", "fail_after_reduce"):
        with pytest.raises(WorkerError) as raised:
            pool.call(method, [1])
        assert raised.value.rank == 1
        assert pool.collective_rpc("total", args=(1.0,)) == [2.0, 2.0]


def test_calls_behind_a_failed_one_are_not_mixed_up_with_it(pool: WorkerPool) -> None:
    futures = [
        pool.submit("fail_after_reduce", [1]) if turn % 3 == 1 else pool.submit("total", turn)
        for turn in range(12)
    ]
    for turn, future in enumerate(futures):
        if turn % 3 == 1:
            assert isinstance(future.exception(timeout=30), WorkerError)
        else:
            assert future.result(timeout=30) == 2.0 * turn


def test_odd_exceptions_come_back_as_text(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="UnpicklableError: 1 and 2") as raised:
        pool.call("fail_oddly")
    assert raised.value.__cause__ is None
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        pool.call("leave")
    with pytest.raises(WorkerError, match=r"AttributeError: .*no attribute 'absent'"):
        pool.call("absent")
    with pytest.raises(WorkerError, match=r"TypeError: .*unexpected keyword"):
        pool.call("echo", wrong=1)


def test_an_exception_that_is_its_own_cause_comes_back(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="BadInputError: of itself"):
        pool.call("fail_of_itself", timeout=PATIENCE_SECONDS)


def test_a_method_has_a_name_of_any_length_and_script(pool: WorkerPool) -> None:
    for name in ("é" * 100, "x" * 1000):
        with pytest.raises(WorkerError, match="AttributeError"):
            pool.call(name)
    with pytest.raises(TypeError, match="method must be the name"):
        pool.call(Worker.echo)


def test_what_cannot_travel_fails_its_call_only(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="this cannot be pickled"):
        pool.call("echo", Unpicklable())
    for kind, why in (
        ("unpicklable", "its result, of type Unpicklable, cannot be sent: this cannot be pickled"),
        ("lambda", "its result, of type function, cannot be sent: Can't pickle local object"),
        ("generator", "of type generator, cannot be sent: iterate over pool.stream"),
        ("coroutine", "of type coroutine, cannot be sent: make it a plain method, and await"),
        ("asynchronous generator", "cannot be sent: make it a plain generator, and iterate over"),
    ):
        with pytest.raises(WorkerError, match=why):
            pool.call("make", kind)
    with pytest.raises(WorkerError, match="MessageDecodeError"):
        pool.call("echo", Undecodable())
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
    assert pool.load == 3  # what nobody waits for keeps no call away
    gate.open()
    assert [future.result(timeout=30) for future in futures] == [0, 0, 0]
    with pytest.raises(CancelledError):
        last.result(timeout=0)
    assert 1000 not in pool.call("note", 1001)


def test_threads_call_at_once_and_each_gets_its_own_answer(pool: WorkerPool) -> None:
    wrong: list[Any] = []

    def many(thread: int) -> None:
        for turn in range(100):
            asked = (thread, turn)
            kind = turn % 3
            if kind == 0:
                answer = pool.call("echo", asked, timeout=60)
            elif kind == 1:
                answer = pool.submit("echo", asked).result(timeout=60)
            else:
                both = pool.collective_rpc("echo", 60, (asked,))
                answer = both[0] if both[0] == both[1] else both
            if answer != asked:
                wrong.append((asked, answer))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_call_that_comes_when_the_collector_is_about_to_stop_is_answered(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller does not listen, as somebody still does; nobody would listen afterwards."""
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
    """Whoever listens never waits to send: 8 MiB each way through rings of 4 and 2."""
    sent = [torch.full((2 << 20,), float(turn)) for turn in range(6)]
    futures = [pool.submit("echo", tensor) for tensor in sent]
    again = [pool.call("echo", tensor, timeout=60) for tensor in sent]
    for tensor, future, answer in zip(sent, futures, again, strict=True):
        assert torch.equal(future.result(timeout=60), tensor)
        assert torch.equal(answer, tensor)


def test_a_late_call_names_method_rank_and_stack_and_the_pool_goes_on(
    pool: WorkerPool, gate: Gate
) -> None:
    began = time.monotonic()
    with pytest.raises(CallTimeoutError) as raised:
        pool.call("hold_before_group", gate, rank=1, timeout=2.5)
    error = raised.value
    assert 2.5 <= time.monotonic() - began < 2.5 + STALL_SECONDS
    gate.open()
    assert (error.method, error.timeout) == ("hold_before_group", 2.5)
    assert [late.rank for late in error.waiting_for] == [0, 1]
    assert "all_reduce" in error.waiting_for[0].operation
    assert error.waiting_for[1].operation == "hold_before_group"
    assert "in all_reduce" in error.stacks[0]
    assert "in hold_before_group" in error.stacks[1]
    assert pool.call("echo", "late but fine", timeout=30) == "late but fine"


def test_only_the_late_ranks_are_named(pool: WorkerPool, gate: Gate) -> None:
    with pytest.raises(CallTimeoutError, match=r"waiting for rank 1 \(pid \d+\)") as raised:
        pool.collective_rpc("hold", 2.5, (gate, [1]))
    gate.open()
    assert list(raised.value.stacks) == [1]
    assert pool.collective_rpc("where", 30)[1][0] == 1


def test_a_call_that_never_left_says_so_and_is_not_made(pool: WorkerPool, gate: Gate) -> None:
    busy = [pool.submit("hold", gate) for _ in range(3)]
    with pytest.raises(CallTimeoutError, match="not sent"):
        pool.call("note", 2000, timeout=0.1)
    gate.open()
    for future in busy:
        future.result(timeout=30)
    assert 2000 not in pool.call("note", 2001)


def test_a_callback_that_ends_its_thread_ends_no_thread_of_the_pools(pool: WorkerPool) -> None:
    def end(_: object) -> None:
        raise SystemExit

    future = pool.submit("echo", 1)
    future.add_done_callback(end)
    assert future.result(PATIENCE_SECONDS) == 1
    assert pool.submit("echo", 2).result(PATIENCE_SECONDS) == 2


def test_a_future_whose_owner_sets_its_result_is_left_as_it_is(
    pool: WorkerPool, gate: Gate
) -> None:
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


def test_what_is_nested_too_deeply_cannot_be_sent(pool: WorkerPool) -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TypeError, match="the arguments of echo cannot be sent: maximum recursion"):
        pool.call("echo", nested)
    assert pool.call("echo", 1) == 1


def test_the_workers_number_what_they_cannot_decode_right_after_what_could_not_be_sent(
    pool: WorkerPool,
) -> None:
    for _ in range(3):
        with pytest.raises(TypeError, match="the arguments of echo cannot be sent: this cannot be"):
            pool.call("echo", Unpicklable())
        with pytest.raises(WorkerError, match="MessageDecodeError"):
            pool.call("echo", Undecodable(), timeout=PATIENCE_SECONDS)
        assert pool.call("echo", 1, timeout=PATIENCE_SECONDS) == 1


@pytest.mark.parametrize("said", [(0.5, 1, "loading"), (1, 2, None)])
def test_progress_of_another_type_is_the_methods_error(said: Any) -> None:
    with WorkerPool(Worker) as pool:
        with pytest.raises(WorkerError, match="report_progress takes two ints and a text"):
            pool.call("report", *said)
        assert pool.call("total", 1.0) == 1.0


def test_progress_is_told_after_the_start_too() -> None:
    told: list[tuple[int, int, int, str]] = []
    with WorkerPool(Worker, on_progress=lambda *what: told.append(what)) as pool:
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
