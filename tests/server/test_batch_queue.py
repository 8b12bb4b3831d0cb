"""Batches: by tokens, in turns, bounded. An item is a range, as long as it costs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import QueueFullError
from server.service.embeddings import BatchQueue, BatchRequest


def request(*costs: int) -> BatchRequest[range, int]:
    loop = asyncio.new_event_loop()
    try:
        items = [range(cost) for cost in costs]
        return BatchRequest(items, [None] * len(items), len(items), loop.create_future())
    finally:
        loop.close()


def taken(queue: BatchQueue[range, int]) -> list[int]:
    return [len(item) for piece in queue.take() for item in piece.items]


def test_a_batch_takes_what_waits_up_to_its_tokens() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=16, max_waiting=100)
    for costs in ((1, 2), (4,), (3, 1), (4, 4, 4)):
        queue.add(request(*costs))
    assert taken(queue) == [1, 2, 4, 3, 1, 4]
    assert queue.waiting == 2
    assert taken(queue) == [4, 4]
    assert taken(queue) == []
    assert queue.waiting == 0


def test_a_large_request_alone_fills_whole_batches() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=16, max_waiting=100)
    queue.add(request(*[4] * 10))
    assert [taken(queue) for _ in range(3)] == [[4] * 4, [4] * 4, [4] * 2]


def test_a_small_request_waits_for_one_share_of_each_large_one() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=16, max_waiting=2000)
    large, small = request(*[4] * 1000), request(1, 1)
    queue.add(large)
    queue.take()
    queue.add(small)
    batch = queue.take()
    assert [piece.request for piece in batch] == [large, small, large, large]
    assert small.waiting == 0


def test_large_requests_share_a_batch_equally() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=16, max_waiting=2000)
    large = [request(*[2] * 100) for _ in range(2)]
    for each in large:
        queue.add(each)
    for _ in range(5):
        queue.take()
    assert [each.waiting for each in large] == [80, 80]


def test_an_item_beyond_a_batch_is_one_of_its_own() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=4, max_waiting=100)
    queue.add(request(1, 99, 1))
    assert [taken(queue) for _ in range(4)] == [[1], [99], [1], []]


def test_a_full_queue_refuses_at_once_and_keeps_what_it_has() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=16, max_waiting=3)
    queue.add(request(1, 2))
    with pytest.raises(QueueFullError, match="no room for 2 more: 2 of at most 3 wait"):
        queue.add(request(3, 4))
    queue.add(request(3))
    assert taken(queue) == [1, 2, 3]


def test_a_dropped_request_leaves_the_others() -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens=4, max_waiting=9)
    leaving = request(2, 2, 2)
    queue.add(leaving)
    queue.add(request(1))
    queue.take()
    queue.drop(leaving)
    queue.drop(leaving)
    assert queue.waiting == len(taken(queue))
    assert queue.waiting == 0


@pytest.mark.parametrize(("max_tokens", "max_waiting"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(max_tokens: int, max_waiting: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        BatchQueue(max_tokens, max_waiting)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), max_size=20), st.integers(1, 16))
def test_every_item_is_in_one_batch_in_its_requests_order(
    asked: list[list[int]], max_tokens: int
) -> None:
    queue: BatchQueue[range, int] = BatchQueue(max_tokens, max_waiting=10_000)
    requests = [request(*costs) for costs in asked]
    for each in requests:
        queue.add(each)
    found: list[list[int]] = [[] for _ in requests]
    while batch := queue.take():
        costs = [len(item) for piece in batch for item in piece.items]
        assert sum(costs) <= max_tokens or len(costs) == 1
        for piece in batch:
            found[requests.index(piece.request)] += range(piece.start, piece.stop)
    assert found == [list(range(len(costs))) for costs in asked]
    assert queue.waiting == 0
