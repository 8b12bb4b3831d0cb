"""Completions as a service: a pool of decoders that is started beside the server, and an engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from ..service.pool_service import PoolService
from ..workers.decoder import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..pool import WorkerPool
    from ..service.service_limits import ServiceLimits
    from ..service.watched_pool import WatchedPool
    from ..workers.decoder import DecoderText, Generation, Sampling

_LOOK_SECONDS = 0.02


class CompletionService(PoolService):
    """Answers prompts of many requests; belongs to one event loop.

    Args:
        text: the model's tokenizer.
        make_pool, limits: see `PoolService`.
    """

    def __init__(
        self,
        text: DecoderText,
        make_pool: Callable[[], WorkerPool],
        limits: ServiceLimits,
    ) -> None:
        super().__init__(make_pool, limits, "completion")
        self.text = text
        self._engine: Engine | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return 0 if self._engine is None else self._engine.waiting

    def generate(
        self, prompt: Sequence[int], max_tokens: int | None, sampling: Sampling
    ) -> Generation:
        """Begin an answer; see `Engine.submit`.

        Raises:
            NotReadyError: see `check_ready`.
            ValueError: the prompt or ``max_tokens`` makes no sense.
            QueueFullError: too many requests wait.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        engine = cast("Engine", self._engine)  # there is one once it is ready
        return engine.submit(prompt, max_tokens, sampling, timeout=self._limits.request_timeout)

    async def _probe(self, pool: WatchedPool) -> None:
        if self._engine is None:
            chunk, most = self._limits.max_tokens, self._limits.max_waiting
            self._engine = await asyncio.to_thread(Engine, pool, chunk=chunk, max_waiting=most)
        async for _ in self._engine.submit([0], 1, timeout=self._limits.request_timeout):
            pass

    async def _finish(self) -> None:
        if self._engine is not None:
            while self._engine.running or self._engine.waiting:
                await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self._engine.close)
