"""Embeddings as a service: batches for a pool that is started beside the server, and watched."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast import CoordinatorError

from ..errors import CallTimeoutError
from ..service.pool_service import NotReadyError, PoolService
from ..spans import of_batch
from .batching import Batcher
from .tokenizing import Tokenizing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from ..pool import WorkerPool
    from ..replicas import Replicas
    from ..service.service_limits import ServiceLimits
    from ..service.watched_pool import WatchedPool
    from ..spans import Carrier
    from ..workers.minilm import EncodedText, SentenceTokenizer
    from .embedding_api import Input

PROBE = "ready"
"""What the probe call embeds."""


class RequestTimeoutError(CoordinatorError, TimeoutError):
    """A request was not answered in time: the requests before it took too long."""


class BadInputError(CoordinatorError, ValueError):
    """An input cannot be embedded; ``__cause__`` is the error that says why."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A request's embeddings.

    Attributes:
        vectors: float32 [hidden] for each input.
        n_tokens: how many tokens all inputs have together.
        truncated: the numbers of the inputs that were cut, as longer than the model takes.
    """

    vectors: list[np.ndarray]
    n_tokens: int
    truncated: list[int]


class EmbeddingService(PoolService):
    """Embeds inputs of many requests; belongs to one event loop.

    Args:
        tokenizer: the model's.
        make_pool, limits: see `PoolService`.
        in_flight: calls that may be with the workers at once.
    """

    def __init__(
        self,
        tokenizer: SentenceTokenizer,
        make_pool: Callable[[], WorkerPool | Replicas],
        limits: ServiceLimits,
        *,
        in_flight: int,
    ) -> None:
        super().__init__(make_pool, limits, "embedding")
        self._tokenizing = Tokenizing(tokenizer)
        self._batcher: Batcher[np.ndarray, np.ndarray] = Batcher(
            self._compute,
            max_tokens=limits.max_tokens,
            max_waiting=limits.max_waiting,
            in_flight=in_flight,
        )

    @property
    def waiting(self) -> int:
        """How many inputs wait to be sent to the workers."""
        return self._batcher.waiting

    async def embed(self, inputs: Sequence[Input], *, truncate: bool) -> Embedded:
        """Embed texts, or lists of token ids.

        Args:
            inputs: what to embed.
            truncate: cut those that are longer than the model takes, in place of refusing them.

        Raises:
            NotReadyError: see `check_ready`.
            BadInputError: an input is too long, or not for this model.
            QueueFullError: too many inputs wait.
            CallTimeoutError: the workers did not answer in time; says which.
            RequestTimeoutError: the requests before it took too long.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        try:
            async with asyncio.timeout(self._limits.request_timeout):
                encoded = await self._encode(inputs, truncate=truncate)
                vectors = await self._batcher.submit(encoded.tokens)
        except CallTimeoutError:
            raise
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"not answered within {self._limits.request_timeout:g} s; "
                f"{self._batcher.waiting} other inputs wait"
            ) from error
        return Embedded(vectors, sum(map(len, encoded.tokens)), encoded.truncated)

    async def stop(self) -> None:
        """See `PoolService.stop`."""
        await super().stop()
        self._tokenizing.close()

    async def _probe(self, pool: WatchedPool) -> None:
        await _vectors(pool, (await self._encode([PROBE], truncate=False)).tokens, [])

    async def _finish(self) -> None:
        await self._batcher.close()

    async def _encode(self, inputs: Sequence[Input], *, truncate: bool) -> EncodedText:
        try:
            return await self._tokenizing.encode(inputs, truncate=truncate)
        except (TypeError, ValueError) as error:
            raise BadInputError(str(error)) from error

    async def _compute(
        self, tokens: list[np.ndarray], traces: list[Carrier]
    ) -> Sequence[np.ndarray]:
        if self._watched is None:
            raise NotReadyError("the workers do not run")
        return await _vectors(self._watched, tokens, traces)


async def _vectors(
    pool: WatchedPool, tokens: list[np.ndarray], traces: Sequence[Carrier]
) -> Sequence[np.ndarray]:
    """The vectors of some lists of tokens, float32 [hidden] each, for those who asked."""
    sizes = [len(each) for each in tokens]
    about = {"items": len(sizes), "tokens": sum(sizes)}
    with pool.counted(sizes), of_batch("embed batch", traces, about):
        future = pool.pool.submit("embed", tokens, timeout=pool.call_timeout, retry=True)
        vectors: np.ndarray = await asyncio.wrap_future(future)
    return list(vectors)
