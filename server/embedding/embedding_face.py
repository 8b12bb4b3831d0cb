"""The routes of embeddings: ``POST /v1/embeddings``, as OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from ..web.api import ApiError
from ..web.face import Face, json_answer, unless_client_leaves
from ..workers.minilm import InputTooLongError
from .embedding_api import read_request, write_response
from .embedding_openapi import embedding_document
from .embedding_service import BadInputError, EmbeddingService

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from ..web.api import ServedModel
    from ..web.openapi import Schema


class EmbeddingFace(Face[EmbeddingService]):
    """The face of a service of embeddings.

    Args:
        service, model, api_key, on_failure: see `Face`.
        truncate: whether inputs that are too long are cut where a request does not say.
    """

    def __init__(
        self,
        service: EmbeddingService,
        model: ServedModel,
        *,
        api_key: str | None,
        truncate: bool,
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(service, model, api_key=api_key, on_failure=on_failure)
        self._truncate = truncate

    def asked(self) -> list[Route]:
        """See `Face`."""
        return [Route("/v1/embeddings", self.answering(self._embed), methods=["POST"])]

    def about(self, *, with_key: bool) -> Schema:
        """See `Face`."""
        return embedding_document(self.model, with_key=with_key)

    def as_api_error(self, error: Exception, request_id: str) -> ApiError:
        """See `Face`."""
        match error:
            case BadInputError(__cause__=InputTooLongError()):
                return ApiError(400, str(error), param="input", code="context_length_exceeded")
            case BadInputError():
                return ApiError(400, str(error), param="input")
        return super().as_api_error(error, request_id)

    async def _embed(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            asked, inputs = read_request(body, self.model)
            truncate = self._truncate if asked.truncate is None else asked.truncate
            found = await unless_client_leaves(
                request, self.service.embed(inputs, truncate=truncate)
            )
        response = json_answer(write_response(asked, found.vectors, found.n_tokens))
        request.state.facts.update(inputs=len(inputs), tokens=found.n_tokens)
        self.service.metrics.inputs.inc(len(inputs))
        self.service.metrics.tokens.inc(found.n_tokens)
        if found.truncated:
            self.service.metrics.truncated.inc(len(found.truncated))
            response.headers["x-truncated-inputs"] = str(len(found.truncated))
            request.state.facts["truncated"] = len(found.truncated)
        return response
