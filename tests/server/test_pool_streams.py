"""Streams of what a worker's generator yields, and calls that are cancelled; real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
import torch

from server.calls.pending_call import CallStream
from server.errors import (
    CallDivergedError,
    CallStuckError,
    CallTimeoutError,
    PoolClosedError,
    WorkerError,
    WorkerLostError,
)
from server.pool import WorkerPool
from tests.patience import STALL_SECONDS, until
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from server.worker import WorkerContext
    from shm_broadcast import CoordinatorError
    from tests.server.workers import Gate


class Speaker:
    """Its generators note what becomes of them."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.world = context.groups.world
        self.made = 0
        self.closed: list[str] = []
        self.cancelled_at_first = context.cancelled()

    def count(self, name: str, stop: int) -> Iterator[int]:
        """Yields the sum of each number over the ranks, so every item needs all of them."""
        try:
            for number in range(stop):
                self.made += 1
                yield int(self.world.all_reduce(torch.tensor(number)).item())
        finally:
            self.closed.append(name)

    def fail_after(self, items: int, rank: int) -> Iterator[int]:
        for number in range(items + 1):
            if number == items and self.world.rank == rank:
                raise ValueError("out of words")
            yield number

    def end_on(self, rank: int) -> Iterator[str]:
        yield "all"
        if self.world.rank != rank:
            yield "not all"

    def sizes(self, *sizes: int) -> Iterator[torch.Tensor]:
        for size in sizes:
            yield torch.full((size,), float(size))

    def fail_to_close(self) -> Iterator[str]:
        try:
            while True:
                yield "fine"
        finally:
            raise ValueError("not now")

    def locks(self) -> Iterator[Any]:
        yield threading.Lock()

    def no_generator(self) -> list[int]:
        return [1, 2]

    def told(self) -> tuple[int, list[str]]:
        return self.made, self.closed

    def told_by_all(self) -> list[Any]:
        return self.world.all_gather_object(self.told())

    def pids(self) -> list[Any]:
        return self.world.all_gather_object(os.getpid())

    def run_until_cancelled(self, gate: Gate) -> str:
        """Come to the gate, which stays shut, and wait there until nobody waits for this call."""
        (gate.folder / str(self.world.rank)).touch()
        until(self.context.cancelled)
        self.closed.append("cancelled")
        return "cancelled"

    def say_until_cancelled(self, gate: Gate) -> Iterator[str]:
        yield "first"
        yield self.run_until_cancelled(gate)

    def run_until_cancelled_in_a_stream(self, gate: Gate) -> Iterator[str]:
        try:
            yield self.run_until_cancelled(gate)
        finally:
            self.closed.append("closed")

    def say_what_passes(self, gate: Gate) -> Iterator[str]:
        """Yields "first" once the gate is open, then "second"."""
        gate.pass_through(self.world.rank)
        yield "first"
        yield "second"

    def pass_through(self, gate: Gate) -> None:
        gate.pass_through(self.world.rank)

    def cancelled(self) -> bool:
        return self.context.cancelled()

    def was_cancelled_at_first(self) -> list[bool]:
        return self.world.all_gather_object(self.cancelled_at_first)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp", "pp"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    tp, pp = request.param
    with WorkerPool(Speaker, tp=tp, pp=pp) as pool:
        yield pool


def reached(gate: Gate) -> None:
    until(lambda: gate.reached(0) and gate.reached(1))


def test_no_call_is_cancelled_before_there_is_one(pool: WorkerPool) -> None:
    assert pool.call("was_cancelled_at_first") == [False, False]


def test_items_come_in_order(pool: WorkerPool) -> None:
    assert list(pool.stream("count", "whole", stop=5)) == [0, 2, 4, 6, 8]
    assert list(pool.stream("count", "empty", 0)) == []
    found = list(pool.stream("sizes", 0, 1, 1_000_000))
    assert [tensor.shape for tensor in found] == [(0,), (1,), (1_000_000,)]
    assert torch.equal(found[2], torch.full((1_000_000,), 1e6))


def test_calls_and_other_streams_go_on_in_between(pool: WorkerPool) -> None:
    with pool.stream("count", "one", 3) as one, pool.stream("count", "two", 3) as two:
        seen = []
        for pair in zip(one, two, strict=True):
            seen.append(pair)
            pool.call("told")
    assert seen == [(0, 0), (2, 2), (4, 4)]


def test_workers_are_one_item_ahead_and_no_more(pool: WorkerPool) -> None:
    before, _ = pool.call("told")
    with pool.stream("count", "ahead", 100) as stream:
        assert pool.call("told")[0] == before
        for taken in (1, 2, 3):
            next(stream)
            assert pool.call("told")[0] == before + taken + 1


def test_leaving_a_stream_closes_the_generator_on_all_ranks(pool: WorkerPool) -> None:
    with pool.stream("count", "left", 100) as stream:
        assert next(stream) == 0
    assert all("left" in closed for _, closed in pool.call("told_by_all"))
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()


def test_a_stream_that_is_dropped_is_closed(pool: WorkerPool) -> None:
    stream = pool.stream("count", "dropped", 100)
    next(stream)
    del stream
    gc.collect()
    until(lambda: all("dropped" in closed for _, closed in pool.call("told_by_all")))


def test_a_stream_that_nobody_reads_begins_nothing(pool: WorkerPool) -> None:
    before, _ = pool.call("told")
    pool.stream("count", "unread", 100).close()
    made, closed = pool.call("told")
    assert made == before
    assert "unread" not in closed


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_ends_the_stream_and_not_the_pool(pool: WorkerPool, rank: int) -> None:
    stream = pool.stream("fail_after", 2, rank)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(WorkerError, match=rf"rank {rank} .*fail_after.*out of words"):
        next(stream)
    assert list(stream) == []
    assert list(pool.stream("count", "after an error", 2)) == [0, 2]


def test_a_generator_that_fails_to_close_is_logged(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    with pool.stream("fail_to_close") as stream:
        assert next(stream) == "fine"
    until(lambda: "could not be closed: rank " in caplog.text)
    assert "fail_to_close: ValueError: not now" in caplog.text
    assert list(pool.stream("count", "after a failure to close", 2)) == [0, 2]


def test_an_item_that_cannot_be_sent_is_told_by_its_own_type(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="its item, of type lock, cannot be sent: cannot pickle"):
        next(pool.stream("locks"))
    assert list(pool.stream("count", "after a lock", 2)) == [0, 2]


def test_who_leaves_pool_and_stream_at_once_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        with WorkerPool(Speaker) as pool:
            for _ in pool.stream("sizes", 1, 2, 3):
                raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_generator_that_ends_on_some_ranks_only_is_an_error(pool: WorkerPool, rank: int) -> None:
    stream = pool.stream("end_on", rank)
    assert next(stream) == "all"
    expected = f"rank {rank} ended the stream where rank {1 - rank} went on with it"
    with pytest.raises(CallDivergedError, match=expected):
        next(stream)
    assert list(pool.stream("count", "after an uneven end", 2)) == [0, 2]


def test_what_is_no_generator_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="no_generator is not a generator: it returned list"):
        next(pool.stream("no_generator"))
    with pytest.raises(ValueError, match="private"):
        pool.stream("_begin")
    with pytest.raises(TypeError, match="cannot pickle"):
        next(pool.stream("count", threading.Lock(), 1))
    assert list(pool.stream("count", "after a slip", 2)) == [0, 2]


async def test_streams_are_awaited(pool: WorkerPool) -> None:
    assert [item async for item in pool.astream("count", "awaited", 4)] == [0, 2, 4, 6]
    async with aclosing(pool.astream("count", "left by await", 100)) as stream:
        assert [await anext(stream), await anext(stream)] == [0, 2]
    assert all("left by await" in closed for _, closed in await pool.acall("told_by_all"))


async def consume(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


@pytest.mark.parametrize("what", ["call", "stream"])
async def test_a_cancelled_task_is_heard_by_the_workers(
    what: str, pool: WorkerPool, gate: Gate
) -> None:
    waited_for = (
        pool.acall("run_until_cancelled", gate)
        if what == "call"
        else consume(pool.astream("say_until_cancelled", gate))
    )
    task = asyncio.create_task(waited_for)
    await asyncio.to_thread(reached, gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(closed[-1] == "cancelled" for _, closed in pool.call("told_by_all"))
    assert pool.call("cancelled") is False


def test_leaving_a_stream_is_heard_by_a_worker_that_is_ahead(pool: WorkerPool, gate: Gate) -> None:
    with pool.stream("say_until_cancelled", gate) as stream:
        assert next(stream) == "first"
        reached(gate)
    assert all(closed[-1] == "cancelled" for _, closed in pool.call("told_by_all"))


def test_no_two_threads_get_one_item(pool: WorkerPool, gate: Gate) -> None:
    with pool.stream("say_what_passes", gate) as stream:
        first = Running(next, stream)
        reached(gate)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="another thread waits for an item of this str"):
                Running(next, stream).result()
        assert not first.ended()
        gate.open()
        assert first.result() == "first"
        assert Running(next, stream).result() == "second"
        with pytest.raises(StopIteration):
            next(stream)


def test_threads_that_take_turns_get_each_item_once(pool: WorkerPool) -> None:
    stream, taken = pool.stream("count", "shared", 40), list[int]()

    def take() -> None:
        while True:
            try:
                taken.append(next(stream))
            except StopIteration:
                return
            except RuntimeError:
                time.sleep(0.001)

    for thread in [Running(take) for _ in range(3)]:
        thread.result()
    assert sorted(taken) == [2 * number for number in range(40)]


def test_a_thread_that_waits_for_an_item_is_not_held_up_by_a_close(
    pool: WorkerPool, gate: Gate
) -> None:
    stream = pool.stream("run_until_cancelled_in_a_stream", gate)
    waiting = Running(next, stream)
    reached(gate)
    stream.close()
    assert waiting.result() == "cancelled"
    with pytest.raises(StopIteration):
        next(stream)
    assert all(closed[-1] == "closed" for _, closed in pool.call("told_by_all"))


def test_a_close_ends_a_wait_for_an_item_that_no_worker_has_begun(
    pool: WorkerPool, gate: Gate
) -> None:
    before, _ = pool.call("told")
    held = [pool.submit("pass_through", gate) for _ in range(3)]
    reached(gate)
    stream = pool.stream("count", "queued", 3)
    waiting = Running(lambda: list(stream))
    until(lambda: pool.load > len(held))
    stream.close()
    assert waiting.result() == []
    gate.open()
    for each in held:
        each.result()
    made, closed = pool.call("told")
    assert made == before
    assert "queued" not in closed


def test_no_stream_is_closed_before_it_begins() -> None:
    steps, begins, goes_on = list[int](), threading.Event(), threading.Event()

    def step(stream: int, first: bool) -> Future[Any]:
        if first:
            begins.set()
            assert goes_on.wait(STALL_SECONDS)
        steps.append(stream)
        return Future()

    stream = CallStream(7, step)
    Running(stream.ask)
    assert begins.wait(STALL_SECONDS)
    closing = Running(stream.close)
    assert not closing.ended(within=0.1)
    goes_on.set()
    closing.result()
    assert steps == [7, -7]


@pytest.mark.parametrize(
    ("error", "warned"),
    [
        (CallTimeoutError("count", 300.0), True),
        (CallStuckError("count", 300.0), False),
        (WorkerLostError(1, 4242, "killed by SIGKILL"), False),
    ],
)
def test_a_generator_that_has_ended_with_its_pool_is_not_warned_of(
    error: CoordinatorError, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def step(stream: int, first: bool) -> Future[Any]:
        found: Future[Any] = Future()
        if first:
            found.set_result((1,))
        else:
            found.set_exception(error)
        return found

    with CallStream(7, step) as stream:
        assert next(stream) == 1
    assert ("could not be closed" in caplog.text) == warned


def test_no_two_tasks_get_one_item(pool: WorkerPool, gate: Gate) -> None:
    async def take() -> tuple[Any, list[str]]:
        async with aclosing(pool.astream("say_what_passes", gate)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(reached, gate)
            with pytest.raises(RuntimeError, match="already running"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="already running"):
                await stream.aclose()
            gate.open()
            return await first, [item async for item in stream]

    assert asyncio.run(take()) == ("first", ["second"])


WAYS: dict[str, Callable[[WorkerPool, Gate], object]] = {
    "call": lambda pool, gate: pool.call("run_until_cancelled", gate, timeout=0.5),
    "submit": lambda pool, gate: pool.submit("run_until_cancelled", gate, timeout=0.5).result(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_late_call_hears_that_nobody_waits(pool: WorkerPool, gate: Gate, way: str) -> None:
    with pytest.raises(CallTimeoutError) as raised:
        WAYS[way](pool, gate)
    assert all("in run_until_cancelled" in stack for stack in raised.value.stacks.values())
    assert sorted(raised.value.stacks) == [0, 1]
    assert all(closed[-1] == "cancelled" for _, closed in pool.call("told_by_all"))


def test_a_late_item_ends_the_stream(pool: WorkerPool, gate: Gate) -> None:
    stream = pool.stream("say_until_cancelled", gate, timeout=0.5)
    with pytest.raises(CallTimeoutError, match="say_until_cancelled"):
        list(stream)
    assert list(stream) == []
    assert list(pool.stream("count", "after a late one", 2)) == [0, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_ends_its_streams(victim: int) -> None:
    with WorkerPool(Speaker, tp=2) as pool:
        pids = pool.call("pids")
        with pool.stream("count", "killed", 10_000) as stream:
            next(stream)
            os.kill(pids[victim], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as raised:
                list(stream)
        assert raised.value.rank == victim


def test_an_item_that_has_come_is_not_lost_when_the_pool_ends() -> None:
    with WorkerPool(Speaker, tp=2) as pool:
        stream = pool.stream("count", "shut down", 100)
        asked = stream.ask()
        assert asked.result(timeout=30) == (0,)
        pool.shutdown()
        assert next(stream) == 0
        with pytest.raises(PoolClosedError):
            next(stream)
    with pytest.raises(PoolClosedError):
        next(pool.stream("count", "closed", 1))


def test_several_results_are_no_stream() -> None:
    with (
        WorkerPool(Speaker, dp=2) as pool,
        pytest.raises(ValueError, match="call and submit return one result"),
    ):
        pool.stream("count", "replicas", 1)
