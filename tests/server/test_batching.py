"""Requests that are computed together, each answered with what is its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.errors import PoolClosedError, QueueFullError
from server.service.embeddings import Batcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Number(int):
    """One token, of that value."""

    def __len__(self) -> int:
        return 1


class Computer:
    """Squares; holds each batch until it is let go."""

    def __init__(self, held: bool = False) -> None:
        self.batches: list[list[Number]] = []
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()

    async def __call__(self, items: list[Number], _: list[dict[str, str]]) -> list[int]:
        self.batches.append(items)
        await self.gate.wait()
        if -1 in items:
            raise ValueError("negative")
        return [item * item for item in items]


def numbers(*given: int) -> list[Number]:
    return [Number(each) for each in given]


def run(test: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def batcher(computer: Computer, **limits: int) -> Batcher[Number, int]:
    return Batcher(computer, **{"max_tokens": 4, "max_waiting": 6, "in_flight": 1, **limits})


async def test_requests_that_wait_together_are_computed_together() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    asked = [asyncio.create_task(batches.submit(numbers(n))) for n in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (batches.running, batches.waiting) == (1, 3)
    computer.gate.set()
    assert await asyncio.gather(*asked) == [[0], [1], [4], [9]]
    assert computer.batches == [[0], [1, 2, 3]]


async def test_a_large_request_is_put_together_from_its_batches() -> None:
    computer = Computer()
    assert await batcher(computer, in_flight=3).submit(numbers(1, 2, 3, 4, 5, 6)) == [
        1, 4, 9, 16, 25, 36,
    ]  # fmt: skip
    assert computer.batches == [[1, 2, 3, 4], [5, 6]]
    assert await batcher(computer).submit(numbers()) == []


async def test_what_does_not_fit_is_refused_while_the_rest_goes_on() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    first = asyncio.create_task(batches.submit(numbers(1)))
    second = asyncio.create_task(batches.submit(numbers(2) * 6))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await batches.submit(numbers(3))
    computer.gate.set()
    assert await first == [1]
    assert await second == [4] * 6


async def test_an_error_reaches_those_of_its_batch_only() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    asked = [asyncio.create_task(batches.submit(numbers(n))) for n in (1, 2, -1)]
    await asyncio.sleep(0)
    computer.gate.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert results[0] == [1]
    assert [str(error) for error in results[1:]] == ["negative", "negative"]
    assert await batches.submit(numbers(5)) == [25]


async def test_the_rest_of_a_request_that_failed_is_not_computed() -> None:
    computer = Computer()
    with pytest.raises(ValueError, match="negative"):
        await batcher(computer).submit(numbers(-1, 1, 1, 1, 2, 2))
    assert computer.batches == [[-1, 1, 1, 1]]


async def test_who_leaves_is_not_computed_for() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    first = asyncio.create_task(batches.submit(numbers(1)))
    leaving = asyncio.create_task(batches.submit(numbers(2, 2)))
    last = asyncio.create_task(batches.submit(numbers(3)))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    assert batches.waiting == 1
    computer.gate.set()
    assert await first == [1]
    assert await last == [9]
    assert computer.batches == [[1], [3]]


async def test_closing_finishes_what_was_taken_and_refuses_the_rest() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    asked = [asyncio.create_task(batches.submit(numbers(n) * 3)) for n in (1, 2)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(batches.close())
    await asyncio.sleep(0)
    with pytest.raises(PoolClosedError):
        await batches.submit(numbers(3))
    computer.gate.set()
    await closing
    assert await asyncio.gather(*asked) == [[1] * 3, [4] * 3]
