"""Streams of what a worker's generator yields, and calls that are cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from server.calls.pending_call import CallStream
from server.errors import (
    CallDivergedError,
    CallTimeoutError,
    PoolClosedError,
    WorkerError,
)
from server.pool import WorkerPool
from tests.patience import STALL_SECONDS, until
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.worker import WorkerContext
    from tests.server.workers import Gate


class Speaker:
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

    def closed_by_all(self) -> list[Any]:
        return self.world.all_gather_object(self.closed)

    def run_until_cancelled(self, gate: Gate) -> str:
        """Come to the gate, which stays shut, and wait until this call is cancelled."""
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
        gate.pass_through(self.world.rank)
        yield "first"
        yield "second"

    def pass_through(self, gate: Gate) -> None:
        gate.pass_through(self.world.rank)

    def cancelled(self) -> bool:
        return self.context.cancelled()

    def was_cancelled_at_first(self) -> list[Any]:
        return self.world.all_gather_object(self.cancelled_at_first)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp", "pp"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    tp, pp = request.param
    with WorkerPool(Speaker, tp=tp, pp=pp) as pool:
        yield pool


def reached(gate: Gate) -> None:
    until(lambda: gate.reached(0) and gate.reached(1))


def all_last_closed(pool: WorkerPool, name: str) -> bool:
    return [closed[-1:] for closed in pool.call("closed_by_all")] == [[name]] * 2


def test_items_come_in_order_while_calls_and_other_streams_go_on(pool: WorkerPool) -> None:
    assert pool.call("was_cancelled_at_first") == [False, False]
    assert list(pool.stream("count", "whole", stop=5)) == [0, 2, 4, 6, 8]
    assert list(pool.stream("count", "empty", 0)) == []
    found = list(pool.stream("sizes", 0, 1, 1_000_000))
    assert [tensor.shape for tensor in found] == [(0,), (1,), (1_000_000,)]
    assert torch.equal(found[2], torch.full((1_000_000,), 1e6))
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


@pytest.mark.parametrize("is_dropped", [False, True])
def test_leaving_a_stream_closes_its_generators(pool: WorkerPool, is_dropped: bool) -> None:
    name = f"left {is_dropped}"
    stream = pool.stream("count", name, 100)
    with nullcontext() if is_dropped else stream:
        assert next(stream) == 0
    if not is_dropped:
        assert all_last_closed(pool, name)
        with pytest.raises(StopIteration):
            next(stream)
        stream.close()
    del stream
    gc.collect()
    until(lambda: all_last_closed(pool, name))


def end_with_an_error(pool: WorkerPool) -> None:
    for rank in (0, 1):
        stream = pool.stream("fail_after", 2, rank)
        assert [next(stream), next(stream)] == [0, 1]
        with pytest.raises(WorkerError, match=rf"rank {rank} .*fail_after.*out of words"):
            next(stream)
        assert list(stream) == []


def end_on_one_rank(pool: WorkerPool) -> None:
    for rank in (0, 1):
        stream = pool.stream("end_on", rank)
        assert next(stream) == "all"
        expected = f"rank {rank} ended the stream where rank {1 - rank} went on with it"
        with pytest.raises(CallDivergedError, match=expected):
            next(stream)


def end_with_what_cannot_be_sent(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="its item, of type lock, cannot be sent: cannot pickle"):
        next(pool.stream("locks"))
    with pytest.raises(TypeError, match="cannot pickle"):
        next(pool.stream("count", threading.Lock(), 1))


def end_without_a_generator(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="no_generator is not a generator: it returned list"):
        next(pool.stream("no_generator"))
    with pytest.raises(ValueError, match="private"):
        pool.stream("_begin")


def end_unread(pool: WorkerPool) -> None:
    before = pool.call("told")
    pool.stream("count", "unread", 100).close()
    assert pool.call("told") == before


@pytest.mark.parametrize(
    "end",
    [
        *(end_with_an_error, end_on_one_rank, end_with_what_cannot_be_sent),
        *(end_without_a_generator, end_unread),
    ],
    ids=lambda end: end.__name__,
)
def test_the_end_of_a_stream_leaves_the_pool(
    pool: WorkerPool, end: Callable[[WorkerPool], None]
) -> None:
    end(pool)
    assert list(pool.stream("count", "after it", 2)) == [0, 2]


def test_a_failed_close_is_logged(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    with pool.stream("fail_to_close") as stream:
        assert next(stream) == "fine"
    until(lambda: "could not be closed: rank " in caplog.text)
    assert "fail_to_close: ValueError: not now" in caplog.text
    assert list(pool.stream("count", "after a failure to close", 2)) == [0, 2]


def test_who_leaves_pool_and_stream_at_once_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        with WorkerPool(Speaker) as pool:
            for _ in pool.stream("sizes", 1, 2, 3):
                raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_streams_are_awaited(pool: WorkerPool) -> None:
    assert [item async for item in pool.astream("count", "awaited", 4)] == [0, 2, 4, 6]
    async with aclosing(pool.astream("count", "left by await", 100)) as stream:
        assert [await anext(stream), await anext(stream)] == [0, 2]
    assert await pool.acall("closed_by_all") == [pool.call("told")[1]] * 2
    assert pool.call("told")[1][-1] == "left by await"


@pytest.mark.parametrize("what", ["call", "stream"])
async def test_workers_see_a_cancelled_task(what: str, pool: WorkerPool, gate: Gate) -> None:
    async def consume() -> None:
        async for _ in pool.astream("say_until_cancelled", gate):
            pass

    waited_for = pool.acall("run_until_cancelled", gate) if what == "call" else consume()
    task = asyncio.create_task(waited_for)
    await asyncio.to_thread(reached, gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all_last_closed(pool, "cancelled")
    assert pool.call("cancelled") is False


def test_a_worker_that_is_ahead_sees_that_a_stream_is_left(pool: WorkerPool, gate: Gate) -> None:
    with pool.stream("say_until_cancelled", gate) as stream:
        assert next(stream) == "first"
        reached(gate)
    assert all_last_closed(pool, "cancelled")


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


def test_a_close_ends_a_wait_for_an_item(pool: WorkerPool, gate: Gate) -> None:
    stream = pool.stream("run_until_cancelled_in_a_stream", gate)
    waiting = Running(next, stream)
    reached(gate)
    stream.close()
    assert waiting.result() == "cancelled"
    with pytest.raises(StopIteration):
        next(stream)
    assert all_last_closed(pool, "closed")


def test_a_close_ends_a_wait_for_a_queued_item(pool: WorkerPool, gate: Gate) -> None:
    before = pool.call("told")
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
    assert pool.call("told") == before


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


WAYS: dict[str, Callable[[WorkerPool, Gate], object]] = {
    "call": lambda pool, gate: pool.call("run_until_cancelled", gate, timeout=0.5),
    "submit": lambda pool, gate: pool.submit("run_until_cancelled", gate, timeout=0.5).result(),
    "stream": lambda pool, gate: list(pool.stream("say_until_cancelled", gate, timeout=0.5)),
}


@pytest.mark.parametrize("way", WAYS)
def test_workers_see_that_a_call_is_late(pool: WorkerPool, gate: Gate, way: str) -> None:
    with pytest.raises(CallTimeoutError) as raised:
        WAYS[way](pool, gate)
    assert all("in run_until_cancelled" in stack for stack in raised.value.stacks.values())
    assert sorted(raised.value.stacks) == [0, 1]
    assert all_last_closed(pool, "cancelled")
    assert list(pool.stream("count", "after a late one", 2)) == [0, 2]


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
