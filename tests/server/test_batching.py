"""Requests of a service that are computed in batches, and when its calls stall."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import server.service
from server.config import ServiceLimits
from server.errors import CallTimeoutError, PoolClosedError, WorkerLostError
from server.service.embeddings import Batcher, BatchQueue, BatchRequest, EmbeddingService
from server.service.metrics import Metrics
from server.service.pool_service import InstrumentedPool, StallDetector
from shm_broadcast import CoordinatorError
from tests.interruptions import Alarm, alarm, interrupt, interruptions
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_service import Pool, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.quick


# The order of a queue: an item is a range, as long as it costs.


def queue(max_tokens: int = 16, max_waiting: int = 2000) -> BatchQueue[range, int]:
    return BatchQueue(max_tokens, max_waiting)


def request(*costs: int) -> BatchRequest[range, int]:
    with closing(asyncio.new_event_loop()) as loop:
        items = [range(cost) for cost in costs]
        return BatchRequest(items, [None] * len(items), len(items), loop.create_future())


def taken(queued: BatchQueue[range, int]) -> list[int]:
    return [len(item) for piece in queued.take() for item in piece.items]


@pytest.mark.parametrize(
    ("max_tokens", "requests", "batches"),
    [
        (16, [(1, 2), (4,), (3, 1), (4, 4, 4)], [[1, 2, 4, 3, 1, 4], [4, 4], []]),
        (16, [[4] * 10], [[4] * 4, [4] * 4, [4] * 2, []]),
        (4, [(1, 99, 1)], [[1], [99], [1], []]),  # an item beyond a batch is one of its own
    ],
)
def test_a_batch_takes_what_waits_up_to_its_tokens(
    max_tokens: int, requests: list[list[int]], batches: list[list[int]]
) -> None:
    queued = queue(max_tokens)
    for costs in requests:
        queued.add(request(*costs))
    assert [taken(queued) for _ in batches] == batches
    assert queued.waiting == 0


def test_requests_share_each_batch() -> None:
    queued, large, small, other = queue(), request(*[4] * 1000), request(1, 1), request(*[4] * 100)
    queued.add(large)
    queued.take()
    queued.add(small)
    assert [piece.request for piece in queued.take()] == [large, small, large, large]
    assert small.waiting == 0
    queued.add(other)
    before = large.waiting
    for _ in range(5):
        queued.take()
    assert (before - large.waiting, other.waiting) == (10, 90)


@pytest.mark.parametrize(("max_tokens", "max_waiting"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(max_tokens: int, max_waiting: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        BatchQueue(max_tokens, max_waiting)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), max_size=20), st.integers(1, 16))
def test_items_keep_their_requests_order(asked: list[list[int]], max_tokens: int) -> None:
    queued = queue(max_tokens, 10_000)
    requests = [request(*costs) for costs in asked]
    for each in requests:
        queued.add(each)
    found: list[list[int]] = [[] for _ in requests]
    while batch := queued.take():
        costs = [len(item) for piece in batch for item in piece.items]
        assert sum(costs) <= max_tokens or len(costs) == 1
        for piece in batch:
            found[requests.index(piece.request)] += range(piece.start, piece.stop)
    assert found == [list(range(len(costs))) for costs in asked]
    assert queued.waiting == 0


# The batches of a service: each request is answered with what is its own.


class Number(int):
    def __len__(self) -> int:
        return 1


class Computer:
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


def batcher(computer: Computer, **limits: int) -> Batcher[Number, int]:
    return Batcher(computer, **{"max_tokens": 4, "max_waiting": 6, "in_flight": 1, **limits})


async def begun(batches: Batcher[Number, int], *requests: list[Number]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(batches.submit(each)) for each in requests]
    await asyncio.sleep(0)
    return tasks


async def test_an_error_reaches_those_of_its_batch_only() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    asked = await begun(batches, *[numbers(n) for n in (1, 2, -1)])
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


async def test_closing_finishes_what_was_taken_and_refuses_the_rest() -> None:
    computer = Computer(held=True)
    batches = batcher(computer)
    asked = await begun(batches, numbers(1) * 3, numbers(2) * 3)
    closing = asyncio.create_task(batches.close())
    await asyncio.sleep(0)
    with pytest.raises(PoolClosedError):
        await batches.submit(numbers(3))
    computer.gate.set()
    await closing
    assert await asyncio.gather(*asked) == [[1] * 3, [4] * 3]


def a_service() -> EmbeddingService:
    tokenizer: Any = Tokenizer()
    pool: Any = Pool()
    limits = ServiceLimits(
        max_tokens=16,
        max_waiting=4,
        request_timeout=PATIENCE_SECONDS,
        stall_timeout=PATIENCE_SECONDS,
    )
    return EmbeddingService(tokenizer, lambda: pool, limits, in_flight=1)


async def lengths(service: EmbeddingService, *texts: str) -> list[float]:
    found = await service.embed(texts, truncate=False)
    return [float(vector[0]) for vector in found.vectors]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # never awaited
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("handler", [interrupt, alarm])
def test_an_interrupted_request_costs_no_other_its_place(handler: Callable[[], object]) -> None:
    """It is answered or fails, at once; as many as before may wait, and are answered."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda *_: None)
        service = a_service()

        async def ready() -> None:
            service.start(lambda: None)
            while service.state != "ready":
                await asyncio.sleep(0)

        def request() -> None:
            try:
                assert runner.run(lengths(service, "abc", "ab")) == [3, 2]
            except Alarm:
                pass
            except CoordinatorError as error:
                assert "a batch was abandoned: Interruption()" in str(error)  # noqa: PT017

        runner.run(ready())
        places = 0
        for place in interruptions(request, server.service, handler=handler):
            places += 1
            texts = [place[: 1 + index] for index in range(4)]
            assert runner.run(lengths(service, *texts)) == [1, 2, 3, 4], place
            assert (service.waiting, service._batcher.running) == (0, 0), place
        assert places > 20
        runner.run(service.stop())


# Which calls the workers of a service have, and since when.


def test_a_call_that_has_timed_out_counts_until_a_later_one_is_answered() -> None:
    watch = StallDetector(limit=5.0)
    early, late, last = watch.begin(10.0), watch.begin(11.0), watch.begin(12.0)
    watch.timed_out(late)
    watch.answered(early)
    assert (watch.running, watch.oldest(13.0), watch.stalled(13.0)) == (2, 2.0, True)
    assert watch.awaited
    watch.timed_out(last)
    assert not watch.awaited
    probe = watch.begin(20.0)
    assert (watch.running, watch.oldest(21.0), watch.stalled(21.0)) == (3, 10.0, True)
    watch.answered(probe)
    assert (watch.running, watch.oldest(22.0), watch.stalled(22.0)) == (0, 0.0, False)


def test_a_call_stalls_at_the_limit_whether_or_not_one_was_withdrawn() -> None:
    watch = StallDetector(limit=5.0)
    late, unsent = watch.begin(0.0), watch.begin(1.0)
    watch.timed_out(late)
    watch.withdrawn(unsent)
    assert (watch.running, watch.oldest(2.0), watch.stalled(2.0)) == (1, 2.0, True)
    watch.answered(late)
    number = watch.begin(10.0)
    assert (watch.stalled(14.9), watch.stalled(15.0)) == (False, True)
    watch.answered(number)
    assert not watch.stalled(15.0)


def test_a_pool_that_is_being_restarted_answers_again_when_a_call_is_answered() -> None:
    pool: Any = SimpleNamespace(restarting=WorkerLostError(1, 4242, "killed"), status=list)
    watched = InstrumentedPool(pool, Metrics(list, "embedding"), ServiceLimits(16, 16, 60.0, 10.0))
    with pytest.raises(CallTimeoutError), watched.counted([3]):
        raise CallTimeoutError("step", 30.0, (), "not sent", {}, ())
    assert "the pool is being restarted after this: " in watched.stalled
    assert "4242" in watched.stalled
    pool.restarting = None
    assert watched.stalled
    with watched.counted([3]):
        pass
    assert watched.stalled == ""
