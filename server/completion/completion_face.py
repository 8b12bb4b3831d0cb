"""The routes of completions: ``POST /v1/completions`` and ``/v1/chat/completions``, as OpenAI's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from starlette.routing import Route

from ..web.api import ApiError
from ..web.event_stream import EventStream
from ..web.face import Face, json_answer, unless_client_leaves
from ..workers.decoder import PromptTooLongError
from .completion_api import Writer, error_event, read_chat, read_completion
from .completion_openapi import completion_document
from .completion_service import CompletionService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from ..web.openapi import Schema
    from ..workers.decoder import AnswerReader, Generation
    from .completion_api import Wish

_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of the error."""


class CompletionFace(Face[CompletionService]):
    """The face of a service of completions."""

    def asked(self) -> list[Route]:
        """See `Face`."""
        return [
            Route("/v1/completions", self.answering(self._complete), methods=["POST"]),
            Route("/v1/chat/completions", self.answering(self._chat), methods=["POST"]),
        ]

    def about(self, *, with_key: bool) -> Schema:
        """See `Face`."""
        return completion_document(self.model, with_key=with_key)

    async def _complete(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            wish = read_completion(body, self.model)
        return await self._answer(request, wish)

    async def _chat(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            wish = read_chat(body, self.model)
        return await self._answer(request, wish)

    async def _answer(self, request: Request, wish: Wish) -> Response:
        self.service.check_ready()
        asked = "messages" if wish.is_chat else "prompt"
        try:
            prompt = await self._tokens(wish)
            generation = self.service.generate(prompt, wish.max_tokens, wish.sampling)
        except PromptTooLongError as error:
            raise ApiError(400, str(error), param=asked, code=_TOO_LONG) from error
        except ValueError as error:
            raise ApiError(400, str(error), param=asked) from error
        writer = Writer(self.model.name, wish.is_chat)
        answer = _Answer(generation, self.service.text.reader(wish.stops))
        request.state.facts["prompt_tokens"] = len(prompt)
        if wish.stream:
            events = self._streamed(request, wish, writer, answer, len(prompt))
            return EventStream(events, generation)
        with generation:
            text = await unless_client_leaves(request, answer.whole())
        request.state.facts["tokens"] = answer.tokens
        self._count_answer(len(prompt) + answer.tokens)
        return json_answer(writer.whole(text, answer.reason, (len(prompt), answer.tokens)))

    async def _tokens(self, wish: Wish) -> list[int]:
        """The prompt's tokens; the event loop goes on meanwhile.

        Raises:
            ApiError: it is too long to be looked at.
            ValueError: the model's template refuses the chat.
        """
        if wish.is_chat:
            messages = cast("list[dict[str, str]]", wish.prompt)
            length = sum(len(text) for each in messages for text in each.values())
            self._check_length(length, "messages")
            if len(messages) > self.model.max_tokens:
                message = f"the chat has {len(messages)} messages; each takes a token at least"
                raise ApiError(400, message, param="messages", code=_TOO_LONG)
            return await asyncio.to_thread(self.service.text.encode_chat, messages)
        if isinstance(wish.prompt, str):
            self._check_length(len(wish.prompt), "prompt")
            return await asyncio.to_thread(self.service.text.encode, wish.prompt)
        return cast("list[int]", wish.prompt)

    def _check_length(self, characters: int, asked: str) -> None:
        most = self.service.text.longest * self.model.max_tokens
        if characters > most:
            message = f"the prompt has {characters} characters; at most {most} can fit"
            raise ApiError(400, message, param=asked, code=_TOO_LONG)

    async def _streamed(
        self, request: Request, wish: Wish, writer: Writer, answer: _Answer, n_prompt: int
    ) -> AsyncIterator[bytes]:
        try:
            for event in writer.opening():
                yield event
            async for text in answer.pieces():
                yield writer.piece(text)
            usage = (n_prompt, answer.tokens) if wish.with_usage else None
            for event in writer.closing(answer.reason, usage):
                yield event
            request.state.outcome = 200
            self._count_answer(n_prompt + answer.tokens)
        except Exception as error:  # noqa: BLE001 - told to the client and to the log
            told = self.as_api_error(error, request.state.request_id)
            request.state.outcome = told.status
            self.service.metrics.errors.labels(told.code or told.kind).inc()
            yield error_event(told)
        finally:
            request.state.facts["tokens"] = answer.tokens

    def _count_answer(self, tokens: int) -> None:
        """Count an answer that was given, and the tokens of its prompt and its own."""
        self.service.metrics.inputs.inc()
        self.service.metrics.tokens.inc(tokens)


class _Answer:
    """The text of a generation.

    Attributes:
        tokens: how many there were so far.
    """

    def __init__(self, generation: Generation, reader: AnswerReader) -> None:
        self.tokens = 0
        self._generation = generation
        self._reader = reader

    @property
    def reason(self) -> str:
        """Why it has ended, in OpenAI's words."""
        return "stop" if self._reader.stopped else self._generation.reason or "stop"

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes; the generation is cancelled at a stop."""
        async for token in self._generation:
            self.tokens += 1
            if text := self._reader.read(token):
                yield text
            if self._reader.stopped:
                self._generation.cancel()
                return
        if rest := self._reader.rest():
            yield rest

    async def whole(self) -> str:
        """All of the text."""
        return "".join([text async for text in self.pieces()])
