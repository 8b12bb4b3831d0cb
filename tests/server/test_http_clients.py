"""The routes behind a real socket: clients that are many, leave, are slow, or send too much."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from benchmarks.http_load import Client
from server.service.app import MAX_BODY_BYTES
from tests.patience import auntil
from tests.server.fake_service import Site, listening, site


def one_has_left(here: Site) -> bool:
    return 'service_requests_total{status="499"} 1.0' in here.service.metrics.expose().decode()


async def test_a_client_that_leaves_is_dropped_from_what_waits() -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays:
        here.pool.held = []
        first = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.pool.held)
        leaves = await Client(url, "m").__aenter__()
        leaves.send(["leaves", "leaves"])
        await auntil(lambda: here.service.status()["items_waiting"] == 2)
        await leaves.__aexit__()
        await auntil(lambda: here.service.status()["items_waiting"] == 0)
        here.pool.let_go()
        assert (await first)[0] == 200
        assert (await stays.embed(["after"]))[0] == 200
        assert here.pool.batches == [["stays"], ["after"]]
        assert one_has_left(here)


async def test_a_client_that_leaves_during_its_batch_takes_nobody_along() -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays:
        here.pool.held = []
        leaves = await Client(url, "m").__aenter__()
        leaves.send(["leaves"])
        await auntil(lambda: here.pool.held)
        second = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        await leaves.__aexit__()
        await auntil(lambda: one_has_left(here))
        here.pool.let_go()
        assert (await second)[0] == 200
        assert here.pool.batches == [["leaves"], ["stays"]]


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    limits = {"max_tokens": 10_000, "max_waiting": 4096, "in_flight": 3}
    async with site(**limits) as here, listening(here) as url:

        async def ask(number: int) -> None:
            choice = random.Random(number)
            async with Client(url, "m") as client:
                for turn in range(10):
                    sizes = [1000 * turn + number, *choice.choices(range(500), k=turn % 3)]
                    client.send(["x" * size for size in sizes], "float")
                    _, answer = await client.receive()
                    got = [entry["embedding"] for entry in answer["data"]]
                    assert got == [[float(size)] for size in sizes]
                    assert answer["usage"]["prompt_tokens"] == sum(sizes)

        await asyncio.gather(*(ask(number) for number in range(100)))
        assert max(sum(map(len, batch)) for batch in here.pool.batches) <= 10_000
        assert here.service.status()["items_waiting"] == 0


async def test_a_full_queue_answers_429_while_the_others_wait() -> None:
    async with site() as here, listening(here) as url:
        here.pool.held = []

        async def ask(_: int) -> int:
            async with Client(url, "m") as client:
                return (await client.embed(["x"]))[0]

        asked = [asyncio.create_task(ask(number)) for number in range(100)]
        await auntil(lambda: sum(task.done() for task in asked) == 95)
        assert {task.result() for task in asked if task.done()} == {429}
        here.pool.let_go()
        assert sorted(await asyncio.gather(*asked)) == [200] * 5 + [429] * 95


async def test_a_body_that_is_too_large_is_refused_though_it_is_still_being_sent() -> None:
    async with site() as here, listening(here) as url:
        for chunked in (False, True):
            answer = await send_too_much(url, chunked)
            assert answer.startswith(b"HTTP/1.1 413 "), answer
            assert b"the body has more than" in answer
        async with Client(url, "m") as client:
            assert (await client.embed(["x"]))[0] == 200


async def send_too_much(url: str, chunked: bool) -> bytes:
    """What comes back while a body of four times the limit is sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d"
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n"
    writer.write(head if chunked else head % (4 * MAX_BODY_BYTES))
    piece = b" " * (1 << 20)
    sending = asyncio.create_task(
        send(writer, b"100000\r\n" + piece + b"\r\n" if chunked else piece)
    )
    try:
        return await reader.read(1 << 16)
    finally:
        sending.cancel()
        writer.close()


async def send(writer: asyncio.StreamWriter, piece: bytes) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
