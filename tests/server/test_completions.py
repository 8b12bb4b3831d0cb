"""Completions and chats over HTTP, asked by OpenAI's client, over a decoder in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
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
from tests.server.fake_service import run, serving
from tests.server.one_worker import LOST, OneWorker
from tests.server.test_metrics import samples
from tests.server.test_minilm_config import edit
from tests.server.tiny_llama import greedy, make_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

CHAT: list[Any] = [{"role": "user", "content": "hi"}]


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

    async def answered(self) -> dict[str, int]:
        """How many requests were counted, by status."""
        async with httpx.AsyncClient(base_url=self.url) as client:
            metrics = (await client.get("/metrics")).text
        found = re.findall(r'^service_requests_total{status="(\d+)"} ([\d.]+)$', metrics, re.M)
        return {status: int(float(count)) for status, count in found}

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


def with_site(folder: Path, test: Callable[[Site], Coroutine[Any, Any, None]], **how: Any) -> None:
    async def body() -> None:
        async with site(folder, **how) as here:
            await test(here)

    run(body)


def test_a_completion_is_that_of_transformers(llama: Path) -> None:
    async def test(here: Site) -> None:
        prompt = here.text.encode("The sea")
        for given in ("The sea", ["The sea"], prompt):
            answer = await here.complete(given, max_tokens=20)
            assert answer.choices[0].text == here.expected(prompt, 20)
            assert answer.choices[0].finish_reason == "length"
            assert answer.object == "text_completion"
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)
        assert (await here.complete("The sea")).usage.completion_tokens == 16

    with_site(llama, test)


def test_a_stream_is_the_same_in_pieces(llama: Path) -> None:
    async def test(here: Site) -> None:
        whole = await here.complete("The sea", max_tokens=20)
        stream = await here.complete(
            "The sea", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert "".join(said) == whole.choices[0].text
        assert len(said) > 5
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage == whole.usage

    with_site(llama, test)


def test_several_prompts_have_an_answer_each(llama: Path) -> None:
    texts = ["The sea", "x", "A tide"]

    async def test(here: Site) -> None:
        prompts = [here.text.encode(text) for text in texts]
        expected = [here.expected(prompt, 9) for prompt in prompts]
        for given in (texts, prompts):
            whole = await here.complete(given, max_tokens=9)
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert [choice.text for choice in whole.choices] == expected
            counts = whole.usage.prompt_tokens, whole.usage.completion_tokens
            assert counts == (sum(map(len, prompts)), 27)
        options = {"include_usage": True}
        stream = await here.complete(texts, max_tokens=9, stream=True, stream_options=options)
        said, order, ended = ["", "", ""], [], []
        async for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.text
                order.append(choice.index)
                ended += [choice.index] if choice.finish_reason == "length" else []
        assert (said, sorted(ended)) == (expected, [0, 1, 2])
        assert order != sorted(order), "the answers were computed one after the other"
        assert chunk.usage == whole.usage

    with_site(llama, test)


def test_an_answer_of_several_that_is_refused_frees_the_slots_of_all(llama: Path) -> None:
    async def test(here: Site) -> None:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="has 64 tokens"):
                await here.complete(["x", "y", "z" * 64], max_tokens=50, stream=stream)
            await auntil(lambda: here.running == 0)
        with pytest.raises(openai.RateLimitError):
            await here.complete(["x"] * 30, max_tokens=50)
        await auntil(lambda: here.running == 0 and here.service.waiting == 0)

    with_site(llama, test)


def test_answers_have_all_that_openais_types_require(llama: Path) -> None:
    """Its client does not check them: it makes objects of any JSON."""

    async def test(here: Site) -> None:
        async with httpx.AsyncClient(base_url=here.url) as client:

            async def post(path: str, **body: Any) -> str:
                answer = await client.post(path, json={"model": "m", "max_tokens": 3, **body})
                assert answer.status_code == 200
                return answer.text

            for prompt in ("x", ["x", "y"]):
                text = await post("/v1/completions", prompt=prompt)
                Completion.model_validate_json(text, strict=True)
            text = await post("/v1/chat/completions", messages=CHAT)
            ChatCompletion.model_validate_json(text, strict=True)
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            text = await post("/v1/chat/completions", messages=CHAT, **usage)
            for line in text.split("\n\n")[:-2]:
                ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
            text = await post("/v1/completions", prompt=["x", "y"], **usage)
            for line in text.split("\n\n")[:-2]:
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:  # OpenAI's own streams have null, too
                    choice["finish_reason"] = choice["finish_reason"] or "length"
                Completion.model_validate_json(json.dumps(chunk), strict=True)

    with_site(llama, test)


def test_chats(llama: Path) -> None:
    async def test(here: Site) -> None:
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
        parts = [{"role": "user", "content": [{"type": "text", "text": "h"}] * 1}]
        parts[0]["content"] += [{"type": "text", "text": "i"}]  # type: ignore[operator]
        assert (await here.chat(messages=parts)).choices[0].message.content == expected
        short = await here.chat(max_completion_tokens=2, max_tokens=5)
        assert short.usage.completion_tokens == 2

    with_site(llama, test)


def test_an_answer_ends_before_a_stop(llama: Path) -> None:
    async def test(here: Site) -> None:
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

    with_site(llama, test)


def test_seeds(llama: Path) -> None:
    async def test(here: Site) -> None:
        async def one(seed: int | None) -> str:
            answer = await here.complete("The sea", temperature=2.0, seed=seed, max_tokens=30)
            return str(answer.choices[0].text)

        assert await one(7) == await one(7)
        assert await one(7) != await one(8)
        assert await one(None) != await one(None)

    with_site(llama, test)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": ["a", ""]}, 400, "the prompt is empty"),
        ({"prompt": ["a", [1]]}, 400, "a text, the token ids of one, or several of one kind"),
        ({"prompt": [1, "a"]}, 400, "a text, the token ids of one, or several of one kind"),
        ({"prompt": ["a"] * 2049}, 400, "prompt has 2049 prompts; a request may have 2048"),
        ({"prompt": [257]}, 400, "token id 257 is not in 0 to 256"),
        ({"prompt": "x" * 64}, 400, "has 64 tokens; with its answer at most 64 fit"),
        ({"prompt": "x" * 1_000_000}, 400, "1000000 characters; at most"),
        ({"prompt": "\ud800"}, 400, "the body is not JSON"),
        ({"max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "Expected `float` >= 0.0 - at `$.temperature`"),
        ({"top_p": 0}, 400, "Expected `float` > 0.0 - at `$.top_p`"),
        ({"top_k": -2}, 400, "Expected `int` >= -1 - at `$.top_k`"),
        ({"stop": ""}, 400, "Expected `str` of length >= 1 - at `$.stop`"),
        ({"stop": ["a"] * 5}, 400, "Expected `array` of length <= 4 - at `$.stop`"),
        ({"n": 2}, 400, "n is not supported"),
        ({"echo": True}, 400, "echo is not supported"),
        ({"logprobs": 1}, 400, "logprobs is not supported"),
        ({"logprobs": 0}, 400, "logprobs is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
        ({"presence_penalty": False}, 400, "presence_penalty is not supported"),
        ({"min_p": 0.5}, 400, "min_p is not supported"),
        ({"repetition_penalty": 2.0}, 400, "repetition_penalty is not supported"),
        ({"ignore_eos": True}, 400, "ignore_eos is not supported"),
        ({"min_tokens": 3}, 400, "min_tokens is not supported"),
        ({"stop_token_ids": [5]}, 400, "stop_token_ids is not supported"),
        ({"model": "other"}, 404, "does not exist"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_requests_that_are_refused(
    llama: Path, fields: dict[str, Any], status: int, text: str
) -> None:
    async def test(here: Site) -> None:
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 3, **fields})
        async with httpx.AsyncClient() as client:
            for stream in ("false", "true"):
                sent = body[:-1] + f', "stream": {stream}}}'
                answer = await client.post(f"{here.url}/v1/completions", content=sent)
                assert answer.status_code == status
                assert text in answer.json()["error"]["message"]
        assert (await here.complete("x")).choices

    with_site(llama, test)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", r"Expected `array` of length >= 1 - at `\$.messages`"),
        ({"messages": [{"role": "user"}]}, "messages", "not a request for a chat: .*content"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages", "with its answer at"),
        ({"messages": [{"role": "tool", "content": ""}] * 65}, "messages", "has 65 messages"),
        (
            {"messages": [*CHAT, {"role": "bogus", "content": "x"}]},
            "messages",
            r"Invalid enum value 'bogus' - at `\$.messages\[1\].role`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            r"Invalid value 'image_url' - at `\$.messages\[0\].content\[0\].type`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages",
            r"missing required field `text` - at `\$.messages\[0\].content\[0\]`",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_messages_that_are_refused(
    llama: Path, fields: dict[str, Any], param: str, text: str
) -> None:
    async def test(here: Site) -> None:
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{here.url}/v1/chat/completions", json={"model": "m", **fields}
            )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert re.search(text, error["message"])

    with_site(llama, test)


def test_what_would_change_nothing_is_taken(llama: Path) -> None:
    """As vLLM's clients send it."""
    neutral: dict[str, Any] = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": False,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "min_tokens": 0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "top_k": -1,
    }

    async def test(here: Site) -> None:
        prompt = here.text.encode("x")
        answer = await here.complete("x", max_tokens=3, extra_body=neutral)
        assert answer.choices[0].text == here.expected(prompt, 3)

    with_site(llama, test)


def test_chats_that_are_refused(llama: Path, tmp_path: Path) -> None:
    async def test(here: Site) -> None:
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            await here.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        for most, older, name in ((3, 0, "max_tokens"), (0, 3, "max_completion_tokens")):
            with pytest.raises(
                openai.BadRequestError, match=rf"Expected `int` >= 1 - at `\$.{name}`"
            ):
                await here.chat(max_completion_tokens=most, max_tokens=older)

    async def untold(here: Site) -> None:
        with pytest.raises(openai.BadRequestError, match="only users speak"):
            await here.chat()

    async def silent(here: Site) -> None:
        with pytest.raises(openai.BadRequestError, match="the model has no chat template"):
            await here.chat()

    with_site(llama, test)
    other = make_llama(tmp_path / "model")
    (other / "chat_template.jinja").write_text("{{ raise_exception('only users speak') }}")
    with_site(other, untold)
    (other / "chat_template.jinja").unlink()
    with_site(other, silent)


def test_too_many_are_told_to_come_again(llama: Path) -> None:
    async def test(here: Site) -> None:
        here.pool.hold()
        asked = [asyncio.create_task(here.complete("x", max_tokens=1)) for _ in range(20)]
        await auntil(lambda: sum(task.done() for task in asked) >= 20 - 8 - 3)
        here.pool.go()
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in found if isinstance(each, openai.RateLimitError)]
        assert 9 <= len(refused) < 20
        assert sum(hasattr(each, "choices") for each in found) == 20 - len(refused)

    with_site(llama, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(llama: Path, stream: bool) -> None:
    async def test(here: Site) -> None:
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

    with_site(llama, test)


def test_lost_workers_in_a_stream(llama: Path) -> None:
    async def test(here: Site) -> None:
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

    with_site(llama, test)


def test_a_token_that_does_not_come(llama: Path) -> None:
    async def test(here: Site) -> None:
        here.pool.hold()
        here.service._limits = replace(here.service._limits, request_timeout=0.3)
        with pytest.raises(openai.InternalServerError, match=r"no token within 0.3 s"):
            await here.complete("x")
        counted = here.service.metrics.totals()
        assert (counted["inputs"], counted["tokens"]) == (0, 0)

    with_site(llama, test)


def test_the_key_is_asked_for(llama: Path) -> None:
    async def test(here: Site) -> None:
        assert (await here.complete("x")).choices
        here.openai.api_key = "wrong"
        with pytest.raises(openai.AuthenticationError):
            await here.complete("x")
        with pytest.raises(openai.AuthenticationError):
            await here.chat()

    with_site(llama, test, api_key="k")


def test_what_is_around_it(llama: Path) -> None:
    async def test(here: Site) -> None:
        await here.complete("x", max_tokens=4)
        async with httpx.AsyncClient(base_url=here.url) as client:
            assert (await client.get("/ready")).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert 'service_requests_total{status="200"} 1.0' in metrics
            assert "service_items_waiting 0.0" in metrics
            steps = 1 + 4  # the first one tried the workers
            assert len(here.pool.steps) == steps
            for name in ('pool_calls_total{outcome="ok"}', "pool_batch_items_count"):
                assert f"{name} {steps}.0" in metrics
            totals = (await client.get("/status")).json()["totals"]
            assert (totals["inputs"], totals["tokens"]) == (1, 1 + 4)
            async for _ in await here.complete("x", max_tokens=3, stream=True):
                pass
            totals = (await client.get("/status")).json()["totals"]
            assert (totals["inputs"], totals["tokens"]) == (2, 2 + 4 + 3)
            paths = (await client.get("/openapi.json")).json()["paths"]
            assert {"/v1/completions", "/v1/chat/completions"} <= {*paths}
            assert "/v1/embeddings" not in paths
            assert (await client.post("/v1/embeddings")).status_code == 404
        assert [each.id async for each in here.openai.models.list()] == ["m"]

    with_site(llama, test)


def test_no_part_of_a_character_is_given_out(llama: Path) -> None:
    text = DecoderText(DecoderFolder.open(llama))
    said = "Zwölf 🦆 and 漢字"
    reader = text.reader()
    pieces = [reader.read(token) for token in text.encode(said)]
    assert "".join(pieces) == said
    assert "" in pieces
    assert "\ufffd" not in "".join(pieces)
    cut = text.reader()
    assert [*map(cut.read, text.encode("a🦆")[:-1]), cut.rest()] == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), "one two three"),
        (("two",), "one "),
        (("three", "two"), "one "),
        (("two t",), "one "),
        (("e two threeX", "threeX"), "one two three"),
        (("o",), ""),
        (("🦆",), "one two three"),
    ],
)
def test_stops_are_found_across_tokens(llama: Path, stops: tuple[str, ...], expected: str) -> None:
    text = DecoderText(DecoderFolder.open(llama))
    reader = text.reader(stops)
    said = "".join(map(reader.read, text.encode("one two three"))) + reader.rest()
    assert said == expected
    assert reader.stopped == (expected != "one two three")


def test_a_folder_whose_words_cannot_be_read(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template: Expected an expression"):
        DecoderText(DecoderFolder.open(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}!"}')
    edit(folder / "tokenizer_config.json", bos_token={"__type": "AddedToken", "content": "<end>"})
    assert DecoderText(DecoderFolder.open(folder)).encode_chat(CHAT)[0] == 256
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="tokenizer or chat template: "):
        DecoderText(DecoderFolder.open(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer or chat template: "):
        DecoderText(DecoderFolder.open(folder))


# --- metrics ------------------------------------------------------------------------------


def test_metrics_count_what_a_hundred_clients_received(llama: Path) -> None:
    asked = [("The sea"[: 2 + n % 6], 1 + n % 9, n % 2 == 0) for n in range(100)]

    async def test(here: Site) -> None:
        async def client(prompt: str, most: int, stream: bool) -> tuple[int, int, str]:
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await here.complete(prompt, max_tokens=most, **options)
            pieces = [piece async for piece in answer] if stream else [answer]
            reasons = [c.finish_reason for piece in pieces for c in piece.choices]
            usage = pieces[-1].usage
            return usage.prompt_tokens, usage.completion_tokens, reasons[-1]

        answers = await asyncio.gather(*(client(*each) for each in asked))
        with pytest.raises(openai.BadRequestError):
            await here.complete("", max_tokens=3)
        found = samples(here.service.metrics.expose().decode())
        model = ("m",)
        assert found["llm_prompt_tokens_total", *model] == sum(each[0] for each in answers)
        assert found["llm_generation_tokens_total", *model] == sum(each[1] for each in answers)
        with_tokens = sum(each[1] > 0 for each in answers)
        assert found["llm_time_to_first_token_seconds_count", *model] == with_tokens
        between = sum(max(each[1] - 1, 0) for each in answers)
        assert found["llm_inter_token_latency_seconds_count", *model] == between
        reasons = Counter(each[2] for each in answers)
        success = {k[1]: v for k, v in found.items() if k[0] == "llm_request_success_total"}
        assert success == reasons
        assert found["service_requests_total", "200"] == len(answers)
        assert found["service_requests_total", "400"] == 1
        assert found["llm_num_requests_running", *model] == 0
        totals = here.service.status()["totals"]
        assert totals["generation_tokens"] == found["llm_generation_tokens_total", *model]
        assert totals["first_token"][-1] == ["+Inf", with_tokens]

    with_site(llama, test, max_waiting=100)


def test_tokens_and_load_are_counted_while_an_answer_is_made(llama: Path) -> None:
    async def test(here: Site) -> None:
        here.pool.hold(after=5)
        pieces = aiter(await here.complete("The sea", max_tokens=50, stream=True))
        await anext(pieces)
        load = here.service.status()["sequences"]
        assert (load["running"], load["waiting"]) == (1, 0)
        assert 0 < load["cache_usage"] < 1
        found = samples(here.service.metrics.expose().decode())
        assert found["llm_generation_tokens_total", "m"] >= 1
        here.pool.go()
        rest = [piece async for piece in pieces]
        assert rest[-1].choices[0].finish_reason == "length"
        await auntil(lambda: here.service.status()["sequences"]["cache_usage"] == 0)

    with_site(llama, test)
