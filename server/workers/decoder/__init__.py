"""A small engine: Llama-type decoders over tensor- and pipeline-parallel ranks.

    with WorkerPool(DecoderWorker, tp=2, worker_kwargs={"model": folder}) as pool:
        with Engine(pool) as engine:
            for token in engine.submit(prompt):
                ...

`engine` schedules sequences; `decoder_worker` computes a step on one rank with `decoder_model` and
`decoder_cache`; `decoder_folder` reads settings and tokenizes. Needs the packages safetensors and
transformers (extra ``decoder``).
"""

from .decoder_cache import Sampling
from .decoder_folder import (
    AnswerReader,
    ChatError,
    DecoderFolder,
    DecoderFolderError,
    DecoderText,
    is_decoder,
    smollm2,
)
from .decoder_worker import DecoderWorker, EngineLimits
from .engine import Engine, GeneratedSequence, GenerationTimeoutError, PromptTooLongError

__all__ = [
    "AnswerReader",
    "ChatError",
    "DecoderFolder",
    "DecoderFolderError",
    "DecoderText",
    "DecoderWorker",
    "Engine",
    "EngineLimits",
    "GeneratedSequence",
    "GenerationTimeoutError",
    "PromptTooLongError",
    "Sampling",
    "is_decoder",
    "smollm2",
]
