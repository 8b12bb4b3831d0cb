"""A service over a pool that is played here, in this process or behind a socket."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import uvicorn

from server.errors import WorkerError, WorkerLostError
from server.http import Face
from server.serve import listen
from server.service import PROBE, EmbeddingService
from server.web_server import WebServer
from shm_broadcast import CoordinatorError, MemberStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class Pool:
    """Answers with the length of each text; can be held, and broken."""

    def __init__(self) -> None:
        self.failure: CoordinatorError | None = None
        self.held: list[tuple[Future[Any], list[str]]] | None = None
        self.batches: list[list[str]] = []
        self.stopped = False

    def submit(self, method: str, inputs: list[str]) -> Future[Any]:
        assert method == "embed_counted"
        if self.failure is not None:
            raise self.failure
        future: Future[Any] = Future()
        if inputs != [PROBE]:
            self.batches.append(inputs)
        if self.held is None or inputs == [PROBE]:
            self.answer(future, inputs)
        else:
            self.held.append((future, inputs))
        return future

    def answer(self, future: Future[Any], inputs: list[str]) -> None:
        if any(text == "boom" for text in inputs):
            future.set_exception(WorkerError(0, "embed_counted", "ValueError", "boom", "trace"))
            return
        lengths = np.array([len(text) for text in inputs])
        future.set_result((lengths[:, None].astype(np.float32), lengths))

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for future, inputs in held:
            self.answer(future, inputs)

    def kill(self) -> None:
        self.failure = WorkerLostError(1, 4242, "killed by SIGKILL")
        held, self.held = self.held or [], None
        for future, _ in held:
            future.set_exception(self.failure)

    def status(self) -> list[MemberStatus]:
        return [MemberStatus(0, 4241, "busy", "dequeue", 9, 0.5), MemberStatus(1, 4242, "lost")]

    def shutdown(self) -> None:
        self.stopped = True


class Site:
    """A service over ``pool`` and a client of it."""

    def __init__(self, pool: Pool, service: EmbeddingService, client: httpx.AsyncClient) -> None:
        self.pool, self.service, self.client = pool, service, client

    async def embed(self, given: Any, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/embeddings", json={"model": "m", "input": given, **fields}
        )

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0.005)


def check_inputs(inputs: list[Any]) -> None:
    if any(isinstance(item, list) for item in inputs):
        raise ValueError("input 0 has token id 9; ids are 0 to 8")


@asynccontextmanager
async def site(
    api_key: str | None = None, start: Callable[[Pool], Any] = lambda pool: pool, **limits: Any
) -> AsyncIterator[Site]:
    pool = Pool()
    folder: Any = SimpleNamespace(bert=SimpleNamespace(hidden_size=1), check_inputs=check_inputs)
    service = EmbeddingService(
        folder,
        lambda: start(pool),
        **{"max_batch": 4, "max_waiting": 4, "in_flight": 1, "call_timeout": 30.0, **limits},
    )
    transport = httpx.ASGITransport(Face(service, "m", api_key, lambda: None).app())
    service.start(lambda: None)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        here = Site(pool, service, client)
        await here.until(lambda: service.state != "starting")
        yield here
    pool.let_go()
    await service.stop()


@asynccontextmanager
async def listening(site: Site) -> AsyncIterator[str]:
    """The service behind a socket of its own; gives its URL."""
    face = Face(site.service, "m", None, lambda: None)
    config = uvicorn.Config(face.app(), log_level="warning", lifespan="off")
    server = WebServer(config, lambda: None)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine, for a minute at most."""
    asyncio.run(asyncio.wait_for(test(), 60))
