"""Batches, in order and bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.batching import Batcher, BatchQueue, Request
from server.errors import PoolClosedError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def request(*items: int) -> Request[int, int]:
    loop = asyncio.new_event_loop()
    try:
        return Request(items, [None] * len(items), len(items), loop.create_future())
    finally:
        loop.close()


def taken(queue: BatchQueue[int, int]) -> list[int]:
    return [item for piece in queue.take() for item in piece.items]


def test_a_batch_takes_what_waits_and_splits_what_does_not_fit() -> None:
    queue: BatchQueue[int, int] = BatchQueue(max_batch=4, max_waiting=100)
    queue.add(request(1, 2, 3))
    queue.add(request(4, 5, 6, 7, 8, 9))
    assert taken(queue) == [1, 2, 3, 4]
    assert queue.waiting == 5
    assert taken(queue) == [5, 6, 7, 8]
    assert taken(queue) == [9]
    assert taken(queue) == []
    assert queue.waiting == 0


def test_a_full_queue_refuses_at_once_and_keeps_what_it_has() -> None:
    queue: BatchQueue[int, int] = BatchQueue(max_batch=4, max_waiting=3)
    queue.add(request(1, 2))
    with pytest.raises(QueueFullError, match="no room for 2 more: 2 of at most 3 wait"):
        queue.add(request(3, 4))
    queue.add(request(5))
    assert taken(queue) == [1, 2, 5]


def test_a_dropped_request_leaves_the_others() -> None:
    queue: BatchQueue[int, int] = BatchQueue(max_batch=2, max_waiting=9)
    leaving = request(1, 2, 3)
    queue.add(leaving)
    queue.add(request(4))
    assert taken(queue) == [1, 2]
    queue.drop(leaving)
    assert queue.waiting == 1
    assert taken(queue) == [4]


@pytest.mark.parametrize(("max_batch", "max_waiting"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(max_batch: int, max_waiting: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        BatchQueue(max_batch, max_waiting)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 8))
def test_every_item_is_in_exactly_one_batch_in_order(sizes: list[int], max_batch: int) -> None:
    queue: BatchQueue[int, int] = BatchQueue(max_batch, max_waiting=1000)
    numbers = iter(range(1000))
    for size in sizes:
        queue.add(request(*(next(numbers) for _ in range(size))))
    batches = []
    while batch := taken(queue):
        batches.append(batch)
    assert [item for batch in batches for item in batch] == list(range(sum(sizes)))
    assert all(len(batch) == max_batch for batch in batches[:-1])


class Computer:
    """Squares; holds each batch until it is let go."""

    def __init__(self, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await self.gate.wait()
        if -1 in items:
            raise ValueError("negative")
        return [item * item for item in items]


def run(test: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def batcher(computer: Computer, **limits: int) -> Batcher[int, int]:
    return Batcher(computer, **{"max_batch": 4, "max_waiting": 6, "in_flight": 1, **limits})


def test_requests_that_wait_together_are_computed_together() -> None:
    async def test() -> None:
        computer = Computer(held=True)
        batches = batcher(computer)
        asked = [asyncio.create_task(batches.submit([n])) for n in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (batches.running, batches.waiting) == (1, 3)
        computer.gate.set()
        assert await asyncio.gather(*asked) == [[0], [1], [4], [9]]
        assert computer.batches == [[0], [1, 2, 3]]

    run(test)


def test_a_large_request_is_put_together_from_its_batches() -> None:
    async def test() -> None:
        computer = Computer()
        assert await batcher(computer, in_flight=3).submit([1, 2, 3, 4, 5, 6]) == [
            1, 4, 9, 16, 25, 36,
        ]  # fmt: skip
        assert computer.batches == [[1, 2, 3, 4], [5, 6]]
        assert await batcher(computer).submit([]) == []

    run(test)


def test_what_does_not_fit_is_refused_while_the_rest_goes_on() -> None:
    async def test() -> None:
        computer = Computer(held=True)
        batches = batcher(computer)
        first = asyncio.create_task(batches.submit([1]))
        second = asyncio.create_task(batches.submit([2] * 6))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batches.submit([3])
        computer.gate.set()
        assert await first == [1]
        assert await second == [4] * 6

    run(test)


def test_an_error_reaches_those_of_its_batch_only() -> None:
    async def test() -> None:
        computer = Computer(held=True)
        batches = batcher(computer)
        asked = [asyncio.create_task(batches.submit([n])) for n in (1, 2, -1)]
        await asyncio.sleep(0)
        computer.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results[0] == [1]
        assert [str(error) for error in results[1:]] == ["negative", "negative"]
        assert await batches.submit([5]) == [25]

    run(test)


def test_the_rest_of_a_request_that_failed_is_not_computed() -> None:
    async def test() -> None:
        computer = Computer()
        with pytest.raises(ValueError, match="negative"):
            await batcher(computer).submit([-1, 1, 1, 1, 2, 2])
        assert computer.batches == [[-1, 1, 1, 1]]

    run(test)


def test_who_leaves_is_not_computed_for() -> None:
    async def test() -> None:
        computer = Computer(held=True)
        batches = batcher(computer)
        first = asyncio.create_task(batches.submit([1]))
        leaving = asyncio.create_task(batches.submit([2, 2]))
        last = asyncio.create_task(batches.submit([3]))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        assert batches.waiting == 1
        computer.gate.set()
        assert await first == [1]
        assert await last == [9]
        assert computer.batches == [[1], [3]]

    run(test)


def test_closing_finishes_what_was_taken_and_refuses_the_rest() -> None:
    async def test() -> None:
        computer = Computer(held=True)
        batches = batcher(computer)
        asked = [asyncio.create_task(batches.submit([n] * 3)) for n in (1, 2)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(batches.close())
        await asyncio.sleep(0)
        with pytest.raises(PoolClosedError):
            await batches.submit([3])
        computer.gate.set()
        await closing
        assert await asyncio.gather(*asked) == [[1] * 3, [4] * 3]

    run(test)
