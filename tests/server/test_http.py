"""The routes, over a pool that is played here: what each state and error looks like to a client."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from server.service.app import MAX_BODY_BYTES, SMALL_BODY_BYTES
from tests.patience import auntil
from tests.server.fake_service import Pool, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def test_an_embedding_and_its_usage() -> None:
    async with site() as here:
        answer = await here.embed(["a", "bcd"])
        assert answer.status_code == 200
        assert [entry["embedding"] for entry in answer.json()["data"]] == [[1.0], [3.0]]
        assert answer.json()["usage"]["prompt_tokens"] == 4


async def test_requests_that_wait_together_share_a_batch_and_each_gets_its_own_answer() -> None:
    async with site() as here:
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x" * n)) for n in range(1, 5)]
        await auntil(lambda: here.service.status()["items_waiting"] == 3)
        here.pool.let_go()
        for n, answer in enumerate(await asyncio.gather(*asked), 1):
            assert answer.json()["data"][0]["embedding"] == [float(n)]
        assert here.pool.batches == [["x"], ["xx", "xxx", "xxxx"]]


async def test_a_full_queue_answers_429_at_once() -> None:
    async with site() as here:
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x")) for _ in range(5)]
        await auntil(lambda: here.service.status()["items_waiting"] == 4)
        refused = await here.embed("y")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        here.pool.let_go()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_what_could_never_wait_is_not_asked_to_try_again() -> None:
    async with site() as here:
        refused = await here.embed(["x"] * 5)
        assert refused.status_code == 400
        assert "at most 4 at once" in refused.json()["error"]["message"]


async def test_a_route_that_is_not_there_answers_in_the_same_shape() -> None:
    async with site() as here:
        missing = await here.client.get("/v1/files")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "no GET /v1/files here"
        wrong = await here.client.get("/v1/embeddings")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_a_dead_worker_answers_503_by_rank_and_is_not_ready() -> None:
    async with site() as here:
        assert (await here.client.get("/ready")).status_code == 200
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x")) for _ in range(3)]
        await auntil(lambda: here.service.status()["items_waiting"] == 2)
        here.pool.kill()
        for answer in [*await asyncio.gather(*asked), await here.embed("later")]:
            assert answer.status_code == 503
            assert "rank 1 (pid 4242): killed by SIGKILL" in answer.json()["error"]["message"]
        ready = await here.client.get("/ready")
        assert ready.status_code == 503
        assert "rank 1" in ready.json()["reason"]
        health = await here.client.get("/health")
        assert (health.status_code, "killed by SIGKILL" in health.text) == (503, True)


async def test_a_failed_batch_answers_500() -> None:
    async with site() as here:
        failed = await here.embed("boom")
        assert failed.status_code == 500
        assert "ValueError: boom" in failed.json()["error"]["message"]
        assert (await here.embed("x")).status_code == 200


async def test_a_pool_is_watched_where_no_thread_can_look_who_holds_it_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(Pool, "hang_report", look)
    async with site(stall_timeout=0.5) as here:
        here.pool.held = []
        asked = asyncio.create_task(here.embed("x"))
        await auntil(lambda: look.call_count > 0)
        here.pool.let_go()
        assert (await asked).status_code == 200
        await auntil(lambda: "calls are answered again" in caplog.messages)


async def test_calls_that_do_not_move_fail_readiness_until_they_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with site(request_timeout=4.0, stall_timeout=0.5) as here:
        here.pool.held = []
        asked = asyncio.create_task(here.embed("x"))
        await auntil(lambda: here.service.state == "stalled")
        for path in ("/ready", "/health/progress"):
            answer = await here.client.get(path)
            assert (answer.status_code, "rank 1 (pid 4242)" in answer.text) == (503, True)
        assert (await here.client.get("/health")).status_code == 200
        assert (await here.embed("y")).status_code == 503
        late = await asked
        assert late.status_code == 504
        assert "rank 1 (pid 4242), last seen in all_reduce" in late.json()["error"]["message"]
        assert here.service.state == "stalled"
        here.pool.held = None
        await auntil(lambda: here.service.state == "ready")
        assert (await here.client.get("/health/progress")).status_code == 200
        assert (await here.embed("x")).status_code == 200
        await auntil(lambda: "calls are answered again" in caplog.messages)
    told = [record.getMessage() for record in caplog.records if "pool_service" in record.name]
    assert "rank 1 (pid 4242)" in told[0]
    assert "Stack of rank 1:\nin all_reduce" in told[1]


async def test_a_request_that_waits_too_long_is_told_so() -> None:
    async with site(request_timeout=1.0, in_flight=2, max_tokens=4) as here:
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x" * n)) for n in (1, 2)]
        await auntil(lambda: len(here.pool.held or ()) == 2)
        late = await here.embed("abc")
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
        await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b'{"model":"m","input":[[9]]}', 400),
        (b'{"model":"n","input":"a"}', 404),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_a_wrong_request_says_why(body: bytes, status: int) -> None:
    async with site() as here:
        answer = await here.client.post("/v1/embeddings", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert here.pool.batches == []


async def test_large_bodies_that_stall_keep_out_no_small_one() -> None:
    async with site() as here:
        stalled, over = [], asyncio.Event()

        async def stall() -> AsyncIterator[bytes]:
            yield b" " * MAX_BODY_BYTES
            stalled.append(1)
            await over.wait()

        async def send(content: AsyncIterator[bytes] | bytes) -> int:
            return (await here.client.post("/v1/embeddings", content=content)).status_code

        stalling = [asyncio.create_task(send(stall())) for _ in range(4)]
        await auntil(lambda: len(stalled) == 4)
        body = json.dumps({"model": "m", "input": "a"}).encode()
        assert await send(body.ljust(SMALL_BODY_BYTES)) == 200
        assert await send(body.ljust(6 * SMALL_BODY_BYTES)) == 429
        over.set()
        assert await asyncio.gather(*stalling) == [400] * 4
        assert await send(body.ljust(6 * SMALL_BODY_BYTES)) == 200


async def test_what_is_sent_in_another_way_is_refused() -> None:
    async with site() as here:
        gzipped = {"content-encoding": "gzip"}
        answer = await here.client.post("/v1/embeddings", content=b"\x1f\x8b", headers=gzipped)
        assert answer.status_code == 415
        assert "the encoding 'gzip': send it as it is" in answer.json()["error"]["message"]
        answer = await here.client.post("/v1/embeddings/", content=b"{}")
        assert (answer.status_code, answer.headers.get("location")) == (404, None)


async def test_a_key_is_asked_for() -> None:
    async with site(api_key="secret") as here:
        for path in ("/status", "/metrics"):
            assert (await here.client.get(path)).status_code == 401
        assert (await here.embed("x")).status_code == 401
        for path in ("/health", "/ready"):
            assert (await here.client.get(path)).status_code == 200
        here.client.headers["authorization"] = "Bearer secret"
        assert (await here.embed("x")).status_code == 200
        here.client.headers["authorization"] = "Bearer \u00e9".encode().decode("latin-1")
        assert (await here.embed("x")).status_code == 401


async def test_status_and_metrics_show_the_workers() -> None:
    async with site() as here:
        await here.embed(["a", "b"])
        status = (await here.client.get("/status")).json()
        assert status["state"] == "ready"
        assert [worker["state"] for worker in status["workers"]] == ["busy", "lost"]
        assert (status["calls_running"], status["oldest_call_seconds"]) == (0, 0.0)
        shown = (await here.client.get("/metrics")).text.splitlines()
        for line in (
            'service_requests_total{status="200"} 1.0',
            'pool_calls_total{outcome="ok"} 2.0',
            "pool_batch_items_sum 3.0",
            "pool_batch_tokens_sum 7.0",
            'service_state{state="ready"} 1.0',
            'service_state{state="stalled"} 0.0',
            "pool_calls_running 0.0",
            'worker_progress_age_seconds{rank="0"} 0.5',
            'worker_up{rank="0"} 1.0',
            'worker_up{rank="1"} 0.0',
        ):
            assert line in shown


async def test_workers_that_do_not_start_leave_a_service_that_says_so() -> None:
    def refuse(_: Pool) -> Pool:
        raise FileNotFoundError("no such model")

    async with site(start=refuse) as here:
        assert isinstance(here.service.failure, FileNotFoundError)
        assert (await here.client.get("/health")).status_code == 503
        ready = await here.client.get("/ready")
        assert (ready.status_code, "no such model" in ready.text) == (503, True)


async def test_stopping_finishes_what_was_accepted() -> None:
    async with site() as here:
        here.pool.held = []
        asked = asyncio.create_task(here.embed("abc"))
        await auntil(lambda: here.pool.held)
        stopping = asyncio.create_task(here.service.stop())
        await asyncio.sleep(0)
        assert (await here.embed("late")).status_code == 503
        here.pool.let_go()
        assert (await asked).json()["data"][0]["embedding"] == [3.0]
        await stopping
        assert here.pool.stopped


async def test_after_the_stop_nothing_is_given_up() -> None:
    """A task that began while the loop ends would be left there, and complain on stderr."""

    async with site() as here:
        pass
    before = asyncio.all_tasks()
    here.service.give_up(lambda: None)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
