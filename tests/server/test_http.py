"""The embeddings service over a fake pool: its routes, without a socket, and its connections."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from benchmarks.http_load import Client
from server.config import MAX_INPUTS
from server.service.api import LONGEST_TEXT, MAX_PARTS, MAX_VALUES, ApiError, ServedModel
from server.service.app import MAX_BODY_BYTES, SMALL_BODY_BYTES
from server.service.embeddings import Tokenizing, read_request, response_to
from server.workers.minilm import SentenceTokenizer
from server.workers.minilm.model_config import EncodedText
from shm_broadcast import CoordinatorError
from tests.patience import auntil
from tests.server.fake_service import Pool, Site, listening, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

pytestmark = pytest.mark.quick

MODEL = ServedModel("m", 3, 8, 100)
EMBEDDINGS = "/v1/embeddings"

# --- Requests and answers -----------------------------------------------------------------


def read(**fields: Any) -> Any:
    return read_request(json.dumps({"model": "m", **fields}).encode(), MODEL)


LOOKS_LIKE_PARTS = ("[" * MAX_PARTS, '{"a\\":[]}' * MAX_PARTS, "," * MAX_VALUES)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([7] * (MAX_VALUES - 1), [[7] * (MAX_VALUES - 1)]),
        *(([text, "b"], [text, "b"]) for text in LOOKS_LIKE_PARTS),
        ([[29_999] * 512] * MAX_INPUTS, [[29_999] * 512] * MAX_INPUTS),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_inputs_have_four_shapes_up_to_the_limits(given: Any, inputs: Any) -> None:
    assert read(input=given)[1] == inputs


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({}, 400, "input", "missing required field `input`"),
        ({"input": []}, 400, "input", "empty list"),
        ({"input": ["a", 1]}, 400, "input", "mixes"),
        ({"input": [[1], "a"]}, 400, "input", "mixes"),
        ({"input": [[[1]]]}, 400, "input", "not an embeddings request"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, 400, "input", f"at most {MAX_INPUTS}"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "'hex'"),
        ({"input": "a", "dimensions": 2}, 400, "dimensions", "must be 3"),
        ({"input": "a", "model": "other"}, 404, "model", "does not exist"),
        ({"input": "a", "model": 7}, 400, "model", "not an embeddings request"),
    ],
)
def test_a_wrong_field_is_named(fields: Any, status: int, param: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as raised:
        read(**fields)
    assert raised.value.status == status
    error = msgspec.to_builtins(raised.value.response())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}


def many_parts(field: bytes, part: bytes) -> bytes:
    return b'{"model":"m","%s":[%s]}' % (field, b",".join([part] * MAX_PARTS))


def many_values(field: str) -> bytes:
    return f'{{"model":"m","{field}":[{"7," * MAX_VALUES}7]}}'.encode()


PARTS, VALUES = f"more than {MAX_PARTS} texts, arrays and obj", f"more than {MAX_VALUES} values"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"model":"m","input":"\\ud800"}', "not JSON: half of a surrogate pair"),
        (b'{"input":"\\ud800","model":"m"}', "not JSON: .* surrogate pair"),
        (b'{"model":"m","input":"\\udc00"}', "not JSON: .* surrogate pair"),
        (b'{"model":"m","input":"a","other":"\x80"}', "not JSON: .*position 34"),
        (b'"m"', "not an embeddings request"),
        (b"[]", "got `array`"),
        (b'{"model":"m","input":' + b"[" * 200_000, "not JSON|not an embeddings|nested too deep"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        *((many_parts(b"input", part), PARTS) for part in (b"[]", b"{}", b'""', b'"[\\""')),
        *((many_parts(b"other", part), PARTS) for part in (b"[]", b"{}", b'""', b'"[\\""')),
        *((many_values(field), VALUES) for field in ("input", "other")),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_body_that_is_no_request_gets_400(body: bytes, text: str) -> None:
    with pytest.raises(ApiError, match=text) as raised:
        read_request(body, MODEL)
    assert raised.value.status == 400
    assert raised.value.param is None or body.startswith(b"{")


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_answer_holds_the_vectors_in_order(encoding: str) -> None:
    vectors = [np.array([1.5, -2.0, 0.1], np.float32), np.array([0.0, 4.0, 5.0], np.float32)]
    request, _ = read(input=["a", "b"], encoding_format=encoding)
    answer = json.loads(msgspec.json.encode(response_to(request, vectors, 7)))
    assert (answer["object"], answer["model"]) == ("list", "m")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for index, (entry, vector) in enumerate(zip(answer["data"], vectors, strict=True)):
        assert (entry["object"], entry["index"]) == ("embedding", index)
        got = entry["embedding"]
        if encoding == "base64":
            got = np.frombuffer(base64.b64decode(got), "<f4")
        assert np.array_equal(np.asarray(got, np.float32), vector)


@pytest.mark.parametrize(
    ("request_line", "content", "status", "text"),
    [
        ("GET /v1/files", b"", 404, "no GET /v1/files here"),
        ("GET /v1/embeddings", b"", 405, ""),
        ("POST /v1/embeddings/", b"{}", 404, "no POST /v1/embeddings/ here"),
        ("POST /v1/embeddings", b"{", 400, "not JSON"),
        ("POST /v1/embeddings", b'{"model":"m","input":[[9]]}', 400, "input 0 has no token ids"),
        ("POST /v1/embeddings", b" " * (MAX_BODY_BYTES + 1), 413, "the body has more than"),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_a_wrong_request_gets_its_reason(
    request_line: str, content: bytes, status: int, text: str
) -> None:
    async with site() as here:
        answer = await here.client.request(*request_line.split(), content=content)
        assert (answer.status_code, answer.headers.get("location")) == (status, None)
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert text in error["message"]
        assert here.pool.batches == []


async def test_a_compressed_body_gets_415() -> None:
    async with site() as here:
        gzipped = {"content-encoding": "gzip"}
        answer = await here.client.post(EMBEDDINGS, content=b"\x1f\x8b", headers=gzipped)
        assert answer.status_code == 415
        assert "the encoding 'gzip': send it as it is" in answer.json()["error"]["message"]


async def test_every_route_of_data_requires_the_key() -> None:
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


# --- Queueing -----------------------------------------------------------------------------


async def test_a_full_queue_answers_429_at_once() -> None:
    async with site() as here:
        never = await here.embed(["x"] * 5)
        assert never.status_code == 400
        assert "at most 4 at once" in never.json()["error"]["message"]
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x")) for _ in range(5)]
        await auntil(lambda: here.service.status()["items_waiting"] == 4)
        refused = await here.embed("y")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        here.pool.let_go()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_request_that_waits_too_long_gets_504() -> None:
    async with site(request_timeout=1.0, in_flight=2, max_tokens=4) as here:
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x" * n)) for n in (1, 2)]
        await auntil(lambda: len(here.pool.held or ()) == 2)
        late = await here.embed("abc")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        await asyncio.gather(*asked)


async def test_large_bodies_that_stall_block_no_small_one() -> None:
    async with site() as here:
        stalled, over = [], asyncio.Event()

        async def stall() -> AsyncIterator[bytes]:
            yield b" " * MAX_BODY_BYTES
            stalled.append(1)
            await over.wait()

        async def send(content: AsyncIterator[bytes] | bytes) -> int:
            return (await here.client.post(EMBEDDINGS, content=content)).status_code

        stalling = [asyncio.create_task(send(stall())) for _ in range(4)]
        await auntil(lambda: len(stalled) == 4)
        body = json.dumps({"model": "m", "input": "a"}).encode()
        assert await send(body.ljust(SMALL_BODY_BYTES)) == 200
        assert await send(body.ljust(6 * SMALL_BODY_BYTES)) == 429
        over.set()
        assert await asyncio.gather(*stalling) == [400] * 4
        assert await send(body.ljust(6 * SMALL_BODY_BYTES)) == 200


LONG = "word " * 1000


class HeldUp(SentenceTokenizer):
    """Finishes a long text only after ``go_on``."""

    max_characters = 1 << 20

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode(
        self, inputs: Sequence[str | Sequence[int]], *, truncate: bool, first: int = 0
    ) -> EncodedText:
        assert LONG not in inputs or self.go_on.wait(60)
        return EncodedText([np.array([first], np.int32)], [1] if truncate else [])


@pytest.mark.parametrize("short", ["a few words", [101, 102], ""])
async def test_tokenizing_a_short_text_waits_for_no_long_one(short: str | list[int]) -> None:
    tokenizer = HeldUp()
    tokenizing = Tokenizing(tokenizer)
    try:
        long = asyncio.create_task(tokenizing.encode([LONG], truncate=False))
        await asyncio.sleep(0)
        found = await asyncio.wait_for(tokenizing.encode([short], truncate=True), 60)
        assert (len(found.tokens), found.truncated) == (1, [1])
        assert not long.done()
        tokenizer.go_on.set()
        assert len((await long).tokens) == 1
    finally:
        tokenizer.go_on.set()
        tokenizing.close()


# --- Health -------------------------------------------------------------------------------


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
    logged = [record.getMessage() for record in caplog.records if "pool_service" in record.name]
    assert "rank 1 (pid 4242)" in logged[0]
    assert "Stack of rank 1:\nin all_reduce" in logged[1]


async def test_a_pool_is_watched_where_no_thread_can_start(
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


async def test_workers_that_do_not_start_leave_a_service_that_gives_the_reason() -> None:
    async with site(start=Mock(side_effect=FileNotFoundError("no such model"))) as here:
        assert isinstance(here.service.failure, FileNotFoundError)
        assert (await here.client.get("/health")).status_code == 503
        ready = await here.client.get("/ready")
        assert (ready.status_code, "no such model" in ready.text) == (503, True)
        seen = (await here.client.get("/status")).json()
        assert (seen["grid"], seen["workers"], seen["reason"]) == ({}, [], "no such model")


async def test_status_and_metrics_show_workers_and_calls() -> None:
    async with site() as here:
        assert (await here.embed(["a", "b"])).status_code == 200
        failed = await here.embed("boom")
        assert (failed.status_code, "ValueError: boom" in failed.text) == (500, True)
        assert (await here.embed("x")).status_code == 200
        seen = (await here.client.get("/status")).json()
        assert seen["state"] == "ready"
        assert seen["grid"] == {"dp": 1, "pp": 1, "pcp": 1, "tp": 2}
        assert [each["place"]["tp"] for each in seen["workers"]] == [0, 1]
        assert [each["state"] for each in seen["workers"]] == ["busy", "lost"]
        assert (seen["calls_running"], seen["oldest_call_seconds"]) == (0, 0.0)
        assert seen["totals"]["requests"] == {"200": 2, "500": 1}
        assert seen["totals"]["calls"] == {"ok": 3, "error": 1}
        assert seen["totals"]["latencies"][-1] == ["+Inf", 2]
        assert "ValueError: boom" in seen["last_failure"]["text"]
        assert seen["verdict"] == []
        found = here.samples()
        expected = {
            ("service_requests_total", "200"): 2,
            ("pool_batch_items_sum",): 5,  # with the probe and what failed
            ("pool_batch_tokens_sum",): 12,
            ("service_state", "ready"): 1,
            ("service_state", "stalled"): 0,
            ("pool_calls_running",): 0,
            ("worker_progress_age_seconds", "0"): 0.5,
            ("worker_up", "0"): 1,
            ("worker_up", "1"): 0,
            ("worker_operation_failures_total", "tp", "0", "all_reduce"): 1,
        }
        assert {name: found[name] for name in expected} == expected


async def test_the_long_message_of_a_failure_is_cut() -> None:
    async with site() as here:
        here.pool.failure = CoordinatorError("<b>" * 1_000_000)
        here.pool.last_failure = time.time(), here.pool.failure
        seen = here.service.status()
        for text in (seen["failure"], seen["reason"], seen["last_failure"]["text"]):
            assert len(text) < LONGEST_TEXT + 50
            assert text.endswith("characters more")


# --- Stopping -----------------------------------------------------------------------------


async def test_after_the_stop_nothing_is_given_up() -> None:
    """A task begun while the loop ends would be left there, and complain on stderr."""
    async with site() as here:
        pass
    before = asyncio.all_tasks()
    here.service.give_up(lambda: None)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


# --- Connections -------------------------------------------------------------------------

BODY = json.dumps({"model": "m", "input": "abc"}).encode()
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Raw:
    """A connection that sends the bytes it is given."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def answer(self, request: bytes) -> bytes:
        """All that the server sends after ``request`` until it closes."""
        self.writer.write(request)
        return await self.reader.read()


def counted_one(here: Site, status: str) -> bool:
    return here.samples().get(("service_requests_total", status)) == 1


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, abort])
async def test_a_client_that_leaves_is_dropped_from_what_waits(
    leave: Callable[[asyncio.StreamWriter], None],
) -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays, Raw(url) as left:
        here.pool.held = []
        first = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.pool.held)
        left.writer.write(HEAD + BODY)
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        leave(left.writer)
        await auntil(lambda: here.service.status()["items_waiting"] == 0)
        here.pool.let_go()
        assert (await first)[0] == 200
        assert (await stays.embed(["after"]))[0] == 200
        assert here.pool.batches == [["stays"], ["after"]]
        assert counted_one(here, "499")


async def test_a_client_that_leaves_during_its_batch_harms_no_other() -> None:
    async with site() as here, listening(here) as url, Client(url, "m") as stays, Raw(url) as left:
        here.pool.held = []
        left.writer.write(HEAD + BODY)
        await auntil(lambda: here.pool.held)
        second = asyncio.create_task(stays.embed(["stays"]))
        await auntil(lambda: here.service.status()["items_waiting"] == 1)
        left.writer.close()
        await auntil(lambda: counted_one(here, "499"))
        here.pool.let_go()
        assert (await second)[0] == 200
        assert here.pool.batches == [["abc"], ["stays"]]


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    limits = {"max_tokens": 10_000, "max_waiting": 4096, "in_flight": 3}
    async with site(**limits) as here, listening(here) as url:

        async def ask(number: int) -> None:
            choice = random.Random(number)
            async with Client(url, "m") as client:
                for turn in range(5):
                    sizes = [1000 * turn + number, *choice.choices(range(500), k=turn % 3)]
                    client.send(["x" * size for size in sizes], "float")
                    _, answer = await client.receive()
                    got = [entry["embedding"] for entry in answer["data"]]
                    assert got == [[float(size)] for size in sizes]
                    assert answer["usage"]["prompt_tokens"] == sum(sizes)

        await asyncio.gather(*(ask(number) for number in range(60)))
        assert max(sum(map(len, batch)) for batch in here.pool.batches) <= 10_000
        assert here.service.status()["items_waiting"] == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_while_it_is_sent(chunked: bool) -> None:
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d"
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n"
    piece = b" " * (1 << 20)

    async def send(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"100000\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()

    async with site() as here, listening(here) as url, Raw(url) as large:
        large.writer.write(head if chunked else head % (4 * MAX_BODY_BYTES))
        sending = asyncio.create_task(send(large.writer))
        answer = await large.reader.read(1 << 16)
        sending.cancel()
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b"the body has more than" in answer
        async with Client(url, "m") as client:
            assert (await client.embed(["x"]))[0] == 200


async def test_connections_beyond_the_limit_get_503_until_there_is_room() -> None:
    async with site() as here, listening(here, connections=1) as url, Raw(url) as asks:
        here.pool.held = []
        last = HEAD.replace(b"host", b"connection: close\r\nhost") + BODY
        asked = asyncio.create_task(asks.answer(last))
        await auntil(lambda: here.pool.held)
        async with Raw(url) as beyond:
            assert (await beyond.answer(HEALTH)).startswith(b"HTTP/1.1 503 ")
        here.pool.let_go()
        assert (await asked).startswith(b"HTTP/1.1 200 ")
        async with Raw(url) as later:
            assert (await later.answer(HEALTH)).startswith(b"HTTP/1.1 200 ")


CHUNKED = HEAD.replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (HEAD.replace(b"host", b"content-length: 1\r\nhost"), 400),
        (CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) + HEALTH, 400),
        (b"GET /health HTTP/1.1\r\nhost: " + b"x" * (64 << 10), 400),
        (HEALTH.replace(b"close", b"close, upgrade\r\nupgrade: websocket"), 200),
    ],
    ids=["TLS", "no host", "two lengths", "chunks and a length", "long head", "upgrade"],
)
async def test_a_connection_that_is_no_http_gets_400_alone(sent: bytes, status: int) -> None:
    """A proxy may see other requests in a body of two lengths than the server does."""
    async with site() as here, listening(here) as url, Raw(url) as wrong:
        here.pool.held = []
        answer = await wrong.answer(sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
        assert here.pool.held == []
