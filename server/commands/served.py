"""What `serve` serves: the HTTP face of a service, by the kind of model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..completion.completion_face import CompletionFace
from ..completion.completion_service import CompletionService
from ..embedding.embedding_face import EmbeddingFace
from ..embedding.embedding_service import EmbeddingService
from ..pool import WorkerPool
from ..replicas import Replicas
from ..web.api import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..service.service_limits import ServiceLimits
    from .read_model import DecoderModel, Model


def serve_embeddings(
    model: Model,
    limits: ServiceLimits,
    pool: Mapping[str, Any],
    *,
    name: str,
    api_key: str | None,
    truncate: bool,
    on_failure: Callable[[], None],
) -> EmbeddingFace:
    """The face of a service of a model that embeds.

    Args:
        model: the model.
        limits: see `ServiceLimits`.
        pool: what its pool is made with.
        name: what requests call it.
        api_key, truncate, on_failure: see `EmbeddingFace`.
    """
    dp, pp = model.workers.dp, model.workers.pp
    make = WorkerPool if dp == 1 else partial(Replicas, dp=dp)
    service = EmbeddingService(
        model.tokenizer, partial(make, **pool), limits, in_flight=dp * (pp + 1)
    )
    folder = model.folder
    served = ServedModel(name, folder.bert.hidden_size, folder.max_length, folder.bert.vocab_size)
    return EmbeddingFace(service, served, api_key=api_key, truncate=truncate, on_failure=on_failure)


def serve_completions(
    model: DecoderModel,
    limits: ServiceLimits,
    pool: Mapping[str, Any],
    *,
    name: str,
    api_key: str | None,
    on_failure: Callable[[], None],
) -> CompletionFace:
    """The face of a service of a model that completes and chats.

    Args:
        model: the model.
        limits: see `ServiceLimits`.
        pool: what its pool is made with.
        name: what requests call it.
        api_key, on_failure: see `Face`.
    """
    service = CompletionService(model.text, partial(WorkerPool, **pool), limits)
    config = model.folder.config
    served = ServedModel(name, config.hidden_size, model.context, config.vocab_size)
    return CompletionFace(service, served, api_key=api_key, on_failure=on_failure)
