"""A service over a fake tokenizer and a fake pool, in this process or behind a socket."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from coordinator.rank_grid import RankGrid
from server.config import ServiceLimits
from server.errors import CallTimeoutError, WorkerError, WorkerLostError
from server.service.api import ServedModel
from server.service.embeddings import PROBE, EmbeddingApp, EmbeddingService
from server.service.listener import listen
from server.service.web_server import WebServer
from server.workers.minilm import EncodedText, InputTooLongError
from shm_broadcast import CoordinatorError, MemberStatus
from shm_broadcast.state.flight_recorder import VerbTotal
from tests.patience import PATIENCE_SECONDS, auntil

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from server.service.app import ServiceApp

STUCK = MemberStatus(1, 4242, "busy", "all_reduce", 7, 12.5)


class Pool:
    """Answers with the length of each text; can be held, and broken."""

    def __init__(self) -> None:
        self.failure: CoordinatorError | None = None
        self.restarting: CoordinatorError | None = None
        self.restarts = 0
        self.operation = "dequeue"
        self.last_failure: tuple[float, CoordinatorError] | None = None
        self.grid = RankGrid.of_job(tp=2, pp=1, dp=1, pcp=1, axes=None)
        self.held: list[tuple[Future[Any], list[str]]] | None = None
        self.batches: list[list[str]] = []
        self.stopped = False

    def submit(
        self, method: str, tokens: list[np.ndarray], *, timeout: float, retry: bool
    ) -> Future[Any]:
        assert (method, retry) == ("embed", True)
        inputs = ["".join(map(chr, each)) for each in tokens]
        if self.failure is not None:
            raise self.failure
        future: Future[Any] = Future()
        if inputs != [PROBE]:
            self.batches.append(inputs)
        if self.held is None:
            self.answer(future, inputs)
        else:
            self.held.append((future, inputs))
            asyncio.get_running_loop().call_later(timeout, self.late, future, timeout)
        return future

    def late(self, future: Future[Any], timeout: float) -> None:
        if not future.done():
            future.set_exception(
                CallTimeoutError("embed", timeout, (STUCK,), stacks={1: "in all_reduce"})
            )

    def answer(self, future: Future[Any], inputs: list[str]) -> None:
        if any(text == "boom" for text in inputs):
            future.set_exception(WorkerError(0, "embed", "ValueError", "boom", "trace"))
            return
        future.set_result(np.array([[len(text)] for text in inputs], np.float32))

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for future, inputs in held:
            if not future.done():
                self.answer(future, inputs)

    def kill(self) -> None:
        self.failure = WorkerLostError(1, 4242, "killed by SIGKILL")
        self.last_failure = time.time(), self.failure
        held, self.held = self.held or [], None
        for future, _ in held:
            future.set_exception(self.failure)

    def break_with(self, text: str) -> None:
        self.failure = WorkerError(0, "embed", "ValueError", text, "trace")
        self.last_failure, self.operation = (time.time(), self.failure), text

    def status(self) -> list[MemberStatus]:
        working = MemberStatus(0, 4241, "busy", self.operation, 9, 0.5)
        return [working, MemberStatus(1, 4242, "lost")]

    def hang_report(self) -> list[str]:
        return []

    def totals(self) -> dict[int, list[VerbTotal]]:
        return {0: [VerbTotal("tp", "all_reduce", 7, 1, 0.5, 4096)]}

    def shutdown(self, timeout: float) -> None:
        assert timeout >= 0
        self.stopped = True


TIMES = {"request_timeout": 60.0, "stall_timeout": 10.0}


class Site:
    """A service over ``pool`` and a client of it."""

    def __init__(self, pool: Pool, service: EmbeddingService, client: httpx.AsyncClient) -> None:
        self.pool, self.service, self.client = pool, service, client

    async def embed(self, given: Any, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/embeddings", json={"model": "m", "input": given, **fields}
        )

    def samples(self) -> dict[tuple[str, ...], float]:
        return samples(self.service.metrics.expose().decode())


class Tokenizer:
    """Makes a token of each character."""

    max_characters = 20_000

    def encode(self, inputs: list[Any], *, truncate: bool, first: int = 0) -> EncodedText:
        found = EncodedText()
        for index, item in enumerate(inputs, first):
            if isinstance(item, list) and not (item and all(0 <= each < 9 for each in item)):
                raise ValueError(f"input {index} has no token ids; ids are 0 to 8")
            if len(item) > MAX_TOKENS:
                if not truncate:
                    raise InputTooLongError(index, len(item), MAX_TOKENS, "tokens")
                found.truncated.append(index)
            cut = item[:MAX_TOKENS]
            found.tokens.append(np.array(list(map(ord, cut)) if isinstance(cut, str) else cut))
        return found


MAX_TOKENS = 10_000
MODEL = ServedModel("m", 1, MAX_TOKENS, 9)


def app_of(service: EmbeddingService, api_key: str | None = None) -> EmbeddingApp:
    return EmbeddingApp(service, MODEL, api_key=api_key, truncate=False)


@asynccontextmanager
async def site(
    api_key: str | None = None,
    start: Callable[[Pool], Any] = lambda pool: pool,
    in_flight: int = 1,
    **limits: Any,
) -> AsyncIterator[Site]:
    pool = Pool()
    tokenizer: Any = Tokenizer()
    service = EmbeddingService(
        tokenizer,
        lambda: start(pool),
        ServiceLimits(**{"max_tokens": 16, "max_waiting": 4, **TIMES, **limits}),
        in_flight=in_flight,
    )
    transport = httpx.ASGITransport(app_of(service, api_key).app())
    service.start(lambda: None)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        here = Site(pool, service, client)
        await auntil(lambda: service.state != "starting")
        yield here
    pool.let_go()
    await service.stop()


@asynccontextmanager
async def listening(
    site: Site, api_key: str | None = None, connections: int = 1000
) -> AsyncIterator[str]:
    """The service behind a socket of its own; gives its URL."""
    async with serving(app_of(site.service, api_key), connections) as url:
        yield url


@asynccontextmanager
async def serving(front: ServiceApp[Any], connections: int = 1000) -> AsyncIterator[str]:
    """An application behind a socket of its own; gives its URL."""
    server = WebServer(front.app(), connections, lambda _: None, 60.0, lifespan="off")
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


@contextmanager
def in_a_thread(serving: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """Enter a service in a thread with an event loop of its own; give what it gives."""
    found: Future[Any] = Future()
    over = threading.Event()

    async def serve() -> None:
        async with serving as here:
            found.set_result(here)
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(lambda: asyncio.run(serve()))
        ended.add_done_callback(lambda _: found.cancel())  # a failed start ends the wait for it
        try:
            yield found.result(PATIENCE_SECONDS)
        finally:
            over.set()
            ended.result(PATIENCE_SECONDS)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """The samples of an exposition, by name and the values of the sorted labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(found: dict[tuple[str, ...], float], name: str) -> dict[str, float]:
    """The samples of a metric with one label, by its value."""
    return {key[1]: value for key, value in found.items() if key[0] == name}
