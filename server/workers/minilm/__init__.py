"""Built-in worker: sentence embeddings of a BERT-type sentence-transformers model.

To load a model needs the packages safetensors and tokenizers (extra ``demo``).
"""

from .minilm_worker import MiniLMWorker, Placed
from .model_config import (
    BertConfig,
    EncodedText,
    InputTooLongError,
    ModelFolder,
    ModelFolderError,
    SentenceTokenizer,
    packaged_model,
)

__all__ = [
    "BertConfig",
    "EncodedText",
    "InputTooLongError",
    "MiniLMWorker",
    "ModelFolder",
    "ModelFolderError",
    "Placed",
    "SentenceTokenizer",
    "packaged_model",
]
