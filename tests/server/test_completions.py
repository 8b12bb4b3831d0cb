"""Completions and chats over HTTP, by OpenAI's client, over a decoder in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from shutil import copytree
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.config import ServiceLimits
from server.service.api import ServedModel
from server.service.completions import CompletionApp, CompletionService
from server.workers.decoder import DecoderFolder, DecoderText
from tests.patience import auntil
from tests.server.fake_service import in_a_thread, labelled, samples, serving
from tests.server.one_worker import LOST, OneWorker
from tests.server.tiny_llama import greedy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}


class Site:
    """A service behind a socket, and OpenAI's client of it."""

    def __init__(self, folder: Path, pool: OneWorker, service: CompletionService, url: str) -> None:
        self.folder, self.pool, self.service, self.url = folder, pool, service, url
        self.text = DecoderText(DecoderFolder.open(folder))
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)

    async def complete(self, prompt: Any, **options: Any) -> Any:
        given = {"model": "m", "temperature": 0.0, **options}
        return await self.openai.completions.create(prompt=prompt, **given)

    async def chat(self, **options: Any) -> Any:
        given = {"model": "m", "messages": CHAT, "temperature": 0.0, **options}
        return await self.openai.chat.completions.create(**given)

    def expected(self, prompt: list[int], count: int, stops: tuple[str, ...] = ()) -> str:
        reader = self.text.reader(stops)
        tokens = [token for token in greedy(self.folder, prompt, count) if token != 256]
        return "".join(map(reader.read, tokens)) + reader.rest()

    async def samples(self) -> dict[tuple[str, ...], float]:
        async with httpx.AsyncClient(base_url=self.url) as client:
            return samples((await client.get("/metrics")).text)

    async def answered(self) -> dict[str, float]:
        """How many requests were counted, by status."""
        return labelled(await self.samples(), "service_requests_total")

    @property
    def running(self) -> int:
        return 0 if self.service._engine is None else self.service._engine.running

    @property
    def unwanted(self) -> int:
        """Answers under way that were cancelled."""
        assert self.service._engine is not None
        lanes = self.service._engine._slot_groups
        return sum(each.cancelled for lane in lanes for each in lane.taken.values())


@asynccontextmanager
async def site(
    folder: Path, api_key: str | None = None, length: int = 64, **limits: Any
) -> AsyncIterator[Site]:
    pool: Any = OneWorker(folder, length=length)
    given: dict[str, Any] = {"request_timeout": 60.0, "stall_timeout": 10.0, **limits}
    service = CompletionService(
        DecoderText(DecoderFolder.open(folder)),
        lambda: pool,
        ServiceLimits(**{"max_tokens": 16, "max_waiting": 8, **given}),
        "m",
    )
    model = ServedModel("m", 36, length, 257)
    app = CompletionApp(service, model, api_key=api_key)
    service.start(lambda: None)
    async with serving(app) as url:
        here = Site(folder, pool, service, url)
        await auntil(lambda: service.state != "starting")
        yield here
        await here.openai.close()
    pool.go()
    await service.stop()


async def test_a_completion_is_that_of_transformers(llama: Path) -> None:
    async with site(llama) as here:
        prompt = here.text.encode("The sea")
        for given in ("The sea", ["The sea"], prompt):
            answer = await here.complete(given, max_tokens=20)
            assert answer.choices[0].text == here.expected(prompt, 20)
            assert answer.choices[0].finish_reason == "length"
            assert answer.object == "text_completion"
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)
        assert (await here.complete("The sea")).usage.completion_tokens == 16
        assert [each.id async for each in here.openai.models.list()] == ["m"]


async def test_each_of_several_prompts_has_its_answer_also_in_a_stream(llama: Path) -> None:
    texts = ["The sea", "x", "A tide"]

    async with site(llama) as here:
        prompts = [here.text.encode(text) for text in texts]
        expected = [here.expected(prompt, 9) for prompt in prompts]
        for given in (texts, prompts):
            whole = await here.complete(given, max_tokens=9)
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert [choice.text for choice in whole.choices] == expected
            counts = whole.usage.prompt_tokens, whole.usage.completion_tokens
            assert counts == (sum(map(len, prompts)), 27)
        stream = await here.complete(texts, max_tokens=9, stream=True, stream_options=USAGE)
        said, order, ended = ["", "", ""], [], []
        async for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.text
                order.append(choice.index)
                ended += [choice.index] if choice.finish_reason == "length" else []
        assert (said, sorted(ended)) == (expected, [0, 1, 2])
        assert order != sorted(order), "the answers were computed one after the other"
        assert chunk.usage == whole.usage


async def test_an_answer_of_several_that_is_refused_frees_the_slots_of_all(llama: Path) -> None:
    async with site(llama) as here:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="has 64 tokens"):
                await here.complete(["x", "y", "z" * 64], max_tokens=50, stream=stream)
            await auntil(lambda: here.running == 0)
        with pytest.raises(openai.RateLimitError):
            await here.complete(["x"] * 30, max_tokens=50)
        await auntil(lambda: here.running == 0 and here.service.waiting == 0)


async def test_answers_have_all_fields_of_openais_types(llama: Path) -> None:
    """Its client does not check them: it makes objects of any JSON."""
    async with site(llama) as here, httpx.AsyncClient(base_url=here.url) as client:

        async def post(path: str, **body: Any) -> str:
            answer = await client.post(path, json={"model": "m", "max_tokens": 3, **body})
            assert answer.status_code == 200
            return answer.text

        for prompt in ("x", ["x", "y"]):
            text = await post("/v1/completions", prompt=prompt)
            Completion.model_validate_json(text, strict=True)
        text = await post("/v1/chat/completions", messages=CHAT)
        ChatCompletion.model_validate_json(text, strict=True)
        usage = {"stream": True, "stream_options": USAGE}
        text = await post("/v1/chat/completions", messages=CHAT, **usage)
        for line in text.split("\n\n")[:-2]:
            ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
        text = await post("/v1/completions", prompt=["x", "y"], **usage)
        for line in text.split("\n\n")[:-2]:
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:  # OpenAI's own streams have null, too
                choice["finish_reason"] = choice["finish_reason"] or "length"
            Completion.model_validate_json(json.dumps(chunk), strict=True)


async def test_a_chat_is_that_of_transformers(llama: Path) -> None:
    async with site(llama) as here:
        prompt = here.text.encode_chat(CHAT)
        whole = await here.chat()
        expected = here.expected(prompt, 64 - len(prompt))
        assert whole.choices[0].message.content == expected
        assert whole.choices[0].message.role == "assistant"
        chunks = [chunk async for chunk in await here.chat(stream=True)]
        assert chunks[0].choices[0].delta.role == "assistant"
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == expected
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        split = parts({"type": "text", "text": "h"}, {"type": "text", "text": "i"})
        assert (await here.chat(**split)).choices[0].message.content == expected
        short = await here.chat(max_completion_tokens=2, max_tokens=5)
        assert short.usage.completion_tokens == 2


async def test_an_answer_ends_before_a_stop(llama: Path) -> None:
    async with site(llama) as here:
        prompt = here.text.encode("The sea")
        whole = here.expected(prompt, 40)
        stop = whole[7:9]
        for stream in (False, True):
            answer = await here.complete("The sea", max_tokens=40, stop=stop, stream=stream)
            pieces = [chunk async for chunk in answer] if stream else [answer]
            said = "".join(piece.choices[0].text for piece in pieces)
            assert said == whole[: whole.index(stop)] == here.expected(prompt, 40, (stop,))
            assert pieces[-1].choices[0].finish_reason == "stop"
            await auntil(lambda: here.running == 0)


async def test_a_seed_repeats_its_answer(llama: Path) -> None:
    async with site(llama) as here:

        async def one(seed: int | None) -> str:
            answer = await here.complete("The sea", temperature=2.0, seed=seed, max_tokens=30)
            return str(answer.choices[0].text)

        assert await one(7) == await one(7)
        assert await one(7) != await one(8)
        assert await one(None) != await one(None)


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*given]}]}


COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    COMPLETION: [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": ["a", [1]]}, "a text, the token ids of one, or several of one kind"),
        ({"prompt": [1, "a"]}, "a text, the token ids of one, or several of one kind"),
        ({"prompt": ["a"] * 2049}, "prompt has 2049 prompts; a request may have 2048"),
        ({"prompt": [257]}, "token id 257 is not in 0 to 256"),
        ({"prompt": "x" * 64}, "has 64 tokens; with its answer at most 64 fit"),
        ({"prompt": "x" * 1_000_000}, "1000000 characters; at most"),
        ({"prompt": "\ud800"}, "the body is not JSON"),
        ({"max_tokens": 0}, "Expected `int` >= 1 - at `$.max_tokens`"),
        ({"top_p": 0}, "Expected `float` > 0.0 - at `$.top_p`"),
        ({"stop": ["a"] * 5}, "Expected `array` of length <= 4 - at `$.stop`"),
        ({"n": 2}, "n is not supported"),
        ({"logprobs": 0}, "logprobs is not supported"),
        ({"presence_penalty": False}, "presence_penalty is not supported"),
        ({"model": "other"}, "does not exist"),
    ],
    CHATS: [
        ({"messages": []}, "Expected `array` of length >= 1 - at `$.messages`"),
        ({"messages": [{"role": "user"}]}, "not a request for a chat: "),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "with its answer at"),
        ({"messages": [{"role": "tool", "content": ""}] * 65}, "has 65 messages"),
        ({"messages": [*CHAT, {"role": "bogus", "content": "x"}]}, "at `$.messages[1].role`"),
        (parts({"type": "image_url"}), "at `$.messages[0].content[0].type`"),
        (parts({"type": "text"}), "missing required field `text` - at `$.messages[0].content[0]`"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"max_tokens": 0, "max_completion_tokens": 3}, "`int` >= 1 - at `$.max_tokens`"),
        ({"max_completion_tokens": 0, "max_tokens": 3}, "at `$.max_completion_tokens`"),
    ],
}


@pytest.fixture(scope="module")
def refusing(llama: Path) -> Iterator[httpx.Client]:
    with in_a_thread(site(llama)) as here, httpx.Client(base_url=here.url) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [(path, *row) for path, rows in REFUSED.items() for row in rows],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_request_is_refused_with_its_reason(
    refusing: httpx.Client, path: str, fields: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"prompt": "x"} if path == COMPLETION else {"messages": CHAT}
    for stream in (False, True):
        body = json.dumps({"model": "m", "max_tokens": 3, **given, **fields, "stream": stream})
        answer = refusing.post(path, content=body)
        assert answer.status_code == (404 if "model" in fields else 400)
        error = answer.json()["error"]
        assert text in error["message"]
        assert error["param"] == (None if "JSON" in text else next(iter(fields)))
    assert refusing.get("/ready").status_code == 200


async def test_fields_that_change_nothing_are_taken(llama: Path) -> None:
    """As vLLM's clients send it."""
    neutral: dict[str, Any] = {"n": 1, "logprobs": False, "top_logprobs": False, "top_k": -1}
    neutral |= {"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0}
    neutral |= {"stop_token_ids": [], "ignore_eos": False}
    async with site(llama) as here:
        prompt = here.text.encode("x")
        answer = await here.complete("x", max_tokens=3, extra_body=neutral)
        assert answer.choices[0].text == here.expected(prompt, 3)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        (None, "the model has no chat template"),
    ],
)
async def test_a_template_that_refuses_a_chat_is_quoted(
    llama: Path, tmp_path: Path, template: str | None, text: str
) -> None:
    file = copytree(llama, tmp_path / "model") / "chat_template.jinja"
    file.write_text(template) if template else file.unlink()
    async with site(file.parent) as here:
        with pytest.raises(openai.BadRequestError, match=text):
            await here.chat()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(llama: Path, stream: bool) -> None:
    async with site(llama) as here:
        here.pool.hold(after=2)
        asking = asyncio.create_task(here.complete("x", max_tokens=60, stream=stream))
        await auntil(lambda: len(here.pool.steps) == 1 + 2 and here.pool.under_way == 1)
        if stream:
            leaving = await asking
            await leaving.close()
        else:
            asking.cancel()
        await auntil(lambda: here.unwanted == 1)
        here.pool.go()
        await auntil(lambda: here.running == 0)
        assert len(here.pool.steps) <= 1 + 3  # the first one tried the workers
        assert (await here.complete("x", max_tokens=5)).usage.completion_tokens == 5
        assert await here.answered() == {"499": 1, "200": 1}


async def test_a_stream_survives_lost_workers(llama: Path) -> None:
    async with site(llama) as here:
        whole = await here.complete("The sea", max_tokens=40)

        def lose(step: int) -> None:
            if step % 9 == 0:
                here.pool.lose()
                raise LOST

        here.pool.before = lose
        stream = await here.complete("The sea", max_tokens=40, stream=True)
        said = "".join([chunk.choices[0].text async for chunk in stream])
        assert said == whole.choices[0].text

        def break_down(step: int) -> None:
            if step > begun + 5:
                here.pool.failure = LOST
                raise LOST

        begun = len(here.pool.steps)
        here.pool.before = break_down
        stream = await here.complete("The sea", max_tokens=40, stream=True)
        with pytest.raises(openai.APIError, match=re.escape(str(LOST))):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="the service is failed"):
            await here.complete("x")
        assert await here.answered() == {"200": 2, "503": 2}


async def test_a_late_token_ends_the_request(llama: Path) -> None:
    async with site(llama) as here:
        here.pool.hold()
        here.service._limits = replace(here.service._limits, request_timeout=0.3)
        with pytest.raises(openai.InternalServerError, match=r"no token within 0.3 s"):
            await here.complete("x")
        counted = here.service.metrics.totals()
        assert (counted["inputs"], counted["tokens"]) == (0, 0)


async def test_completions_require_the_key(llama: Path) -> None:
    async with site(llama, api_key="k") as here:
        assert (await here.complete("x")).choices
        here.openai.api_key = "wrong"
        with pytest.raises(openai.AuthenticationError):
            await here.complete("x")
        with pytest.raises(openai.AuthenticationError):
            await here.chat()


# --- Metrics ------------------------------------------------------------------------------


async def test_metrics_count_what_a_hundred_clients_received(llama: Path) -> None:
    asked = [("The sea"[: 2 + n % 6], 1 + n % 9, n % 2 == 0) for n in range(100)]

    async with site(llama, max_waiting=100) as here:

        async def client(prompt: str, most: int, stream: bool) -> tuple[int, int, str]:
            options = {"stream": True, "stream_options": USAGE} if stream else {}
            answer = await here.complete(prompt, max_tokens=most, **options)
            pieces = [piece async for piece in answer] if stream else [answer]
            reasons = [c.finish_reason for piece in pieces for c in piece.choices]
            usage = pieces[-1].usage
            return usage.prompt_tokens, usage.completion_tokens, reasons[-1]

        answers = await asyncio.gather(*(client(*each) for each in asked))
        with pytest.raises(openai.BadRequestError):
            await here.complete("", max_tokens=3)
        found = await here.samples()
        model = ("m",)
        assert found["llm_prompt_tokens_total", *model] == sum(each[0] for each in answers)
        assert found["llm_generation_tokens_total", *model] == sum(each[1] for each in answers)
        with_tokens = sum(each[1] > 0 for each in answers)
        assert found["llm_time_to_first_token_seconds_count", *model] == with_tokens
        between = sum(max(each[1] - 1, 0) for each in answers)
        assert found["llm_inter_token_latency_seconds_count", *model] == between
        reasons = Counter(each[2] for each in answers)
        assert labelled(found, "llm_request_success_total") == reasons
        assert found["service_requests_total", "200"] == len(answers)
        assert found["service_requests_total", "400"] == 1
        assert found["llm_num_requests_running", *model] == 0
        totals = here.service.status()["totals"]
        assert totals["generation_tokens"] == found["llm_generation_tokens_total", *model]
        tokens = sum(prompt + answer for prompt, answer, _ in answers)
        assert (totals["inputs"], totals["tokens"]) == (len(answers), tokens)
        steps = len(here.pool.steps)
        assert found["pool_calls_total", "ok"] == found["pool_batch_items_count",] == steps
        assert totals["first_token"][-1] == ["+Inf", with_tokens]


async def test_tokens_and_load_are_counted_while_an_answer_is_made(llama: Path) -> None:
    async with site(llama) as here:
        here.pool.hold(after=5)
        pieces = aiter(await here.complete("The sea", max_tokens=50, stream=True))
        await anext(pieces)
        load = here.service.status()["sequences"]
        assert (load["running"], load["waiting"]) == (1, 0)
        assert 0 < load["cache_usage"] < 1
        found = await here.samples()
        assert found["llm_generation_tokens_total", "m"] >= 1
        here.pool.go()
        rest = [piece async for piece in pieces]
        assert rest[-1].choices[0].finish_reason == "length"
        await auntil(lambda: here.service.status()["sequences"]["cache_usage"] == 0)
