"""A small engine: Llama-type decoders over tensor- and pipeline-parallel ranks.

    with WorkerPool(DecoderWorker, tp=2, worker_kwargs={"model": folder}) as pool:
        with Engine(pool) as engine:
            for token in engine.submit(prompt):
                ...

To read it: `engine` (who is computed when), `generation` (one answer), `decoder_worker` (a step on
one rank), `decoder_model` (the arithmetic), `kv_cache` and `sampling`. `decoder_text` makes tokens
of text. Needs the packages safetensors and tokenizers (extra ``decoder``).
"""

from .decoder_cache import Sampling
from .decoder_config import DecoderFolder, DecoderFolderError, is_decoder, smollm2
from .decoder_text import AnswerReader, ChatError, DecoderText
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
