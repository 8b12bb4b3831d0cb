"""The built-in worker: sentence embeddings of a BERT-type sentence-transformers model.

Needs the packages safetensors and tokenizers (extra ``demo``) where a model is loaded.
"""

from server.workers.minilm.config import BertConfig, ModelFolder, ModelFolderError
from server.workers.minilm.packaged import packaged_model
from server.workers.minilm.tokenizer import SentenceTokenizer
from server.workers.minilm.worker import MiniLMWorker, Placed

__all__ = [
    "BertConfig",
    "MiniLMWorker",
    "ModelFolder",
    "ModelFolderError",
    "Placed",
    "SentenceTokenizer",
    "packaged_model",
]
