"""Requests of a service when a signal handler raises in the middle of one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import server.service
from server.config import ServiceLimits
from server.service.embeddings import EmbeddingService
from shm_broadcast import CoordinatorError
from tests.interruptions import Alarm, alarm, interrupt, interruptions
from tests.patience import PATIENCE_SECONDS
from tests.server.fake_service import Pool, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WAITING = 4


def a_service() -> EmbeddingService:
    tokenizer: Any = Tokenizer()
    pool: Any = Pool()
    limits = ServiceLimits(
        max_tokens=16,
        max_waiting=MAX_WAITING,
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
def test_a_request_that_is_interrupted_anywhere_costs_no_other_its_place(
    handler: Callable[[], object],
) -> None:
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
            texts = [place[: 1 + index] for index in range(MAX_WAITING)]
            assert runner.run(lengths(service, *texts)) == [1, 2, 3, 4], place
            assert (service.waiting, service._batcher.running) == (0, 0), place
        assert places > 20
        runner.run(service.stop())
